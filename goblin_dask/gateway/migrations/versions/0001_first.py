"""Owners, tokens, hosts, reputations, events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

COUNTS = ("accepted", "wrong", "unproven", "late", "lost", "failed", "streak", "doubts")


def upgrade() -> None:
    op.create_table(
        "owners",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("name", sa.String(128), nullable=False, unique=True),
        sa.Column("created", sa.Double(), nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("owner_id", sa.Integer(), sa.ForeignKey("owners.id"), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("revoked", sa.Double()),
    )
    op.create_index("ix_tokens_owner_id", "tokens", ["owner_id"])
    op.create_table(
        "hosts",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("host", sa.String(32), nullable=False),
        sa.Column("device", sa.String(128), nullable=False),
        sa.Column("driver", sa.String(128), nullable=False),
        sa.Column("first_seen", sa.Double(), nullable=False),
        sa.Column("last_seen", sa.Double(), nullable=False),
    )
    op.create_index("ix_hosts_owner", "hosts", ["owner"])
    op.create_table(
        "reputations",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(128), nullable=False),
        sa.Column("identity", sa.String(32), nullable=False),
        *(sa.Column(count, sa.Integer(), nullable=False) for count in COUNTS),
        sa.Column("quota", sa.Double(), nullable=False),
        sa.Column("flops", sa.Double(), nullable=False),
        sa.Column("quarantined", sa.String(200), nullable=False),
    )
    op.create_index("ix_reputations_owner", "reputations", ["owner"])
    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("host_key", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("method", sa.String(16), nullable=False),
        sa.Column("ratio", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("flops", sa.Double(), nullable=False),
    )
    op.create_index("ix_events_time", "events", ["time"])
    op.create_index("ix_events_host_key", "events", ["host_key"])


def downgrade() -> None:
    for table in ("events", "reputations", "hosts", "tokens", "owners"):
        op.drop_table(table)

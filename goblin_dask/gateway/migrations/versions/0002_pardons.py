"""Pardons."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "pardons",
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("time", sa.Double(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("pardons")

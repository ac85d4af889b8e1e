"""Alembic's entry point: migrations run on the connection that `goblin_dask.gateway.database.upgrade` hands over."""

from alembic import context

from goblin_dask.gateway.database import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite cannot alter a table's columns in place
)
with context.begin_transaction():
    context.run_migrations()

"""The border between Dask and strangers.

==================  =========================================================================================
`frames`            sans-IO core of a resumable session: numbered frames, windows, bounded buffers
`session`           what both ends share: one WebSocket at a time, channels, keep-alives
`client`            the end that dials, and dials again: `dial`, `ClientSession`
`process`           the sessions of a Dask worker's process: `introduce`, `current`
`server`            the end that answers: `SessionServer`, mounted by the gateway
`schema`, `codec`   closed schemas of everything that Dask's two ends may tell each other, and the translation
`comm`              ``goblin://`` and ``goblins://`` for ``dask worker``; `GatewayComm` for the scheduler
`work`              `run_work`, the one function that a Dask task of the grid may call
`dask_internals`    every touch of distributed's internals; `GridScheduler`
==================  =========================================================================================

Nothing is imported here: a volunteer loads no server, a laboratory no Dask worker.
"""

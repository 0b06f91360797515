"""The engine: packed forward passes of one model over static per-sample caches.

:mod:`~dlmgrid.workers.engine.engine` needs torch; :mod:`~dlmgrid.workers.engine.memory` does not, so nothing
is re-exported here.
"""

"""The control process, the only Ray driver: pools, SLO store, admin endpoint."""

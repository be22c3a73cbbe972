"""The worker process and the kit that adapters are written against. Re-exports nothing, so that
importing one module of the kit never pulls in numpy or an engine."""

"""Worker life: a pure state machine, the process handle, the streams, the dossiers."""

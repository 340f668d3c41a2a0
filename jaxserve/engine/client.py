"""The asynchronous face of the engine, for code that lives on an event loop (the server, the Python API)."""

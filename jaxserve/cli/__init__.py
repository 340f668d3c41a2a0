"""The `jaxserve` command. Heavy imports (jax, the server) happen inside the commands, so that --help answers at once."""

"""The `jaxserve` command. Commands import jax and the server when they run, so that --help answers at once."""

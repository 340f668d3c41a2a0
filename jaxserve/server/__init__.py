"""The HTTP server: routes, event streams, errors, keys, metrics, and the process around them."""

"""OpenAI's protocol: request and response types, and how responses are assembled from the engine's tokens."""

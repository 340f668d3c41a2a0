"""OpenAI types and the assembly of responses, shared by the server and the Python API."""

"""The OpenAPI description that the server gives of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from jaxserve.config import ServerConfig
from jaxserve.protocol.requests import ChatCompletionRequest, CompletionRequest
from jaxserve.protocol.responses import ChatCompletion, Completion, DetokenizedText, Model, ModelList, Tokens
from jaxserve.protocol.responses_api_objects import ResponseObject
from jaxserve.protocol.responses_api_requests import ResponsesRequest
from jaxserve.protocol.tokenize_requests import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from jaxserve.server.openapi_schemas import Schema, request_schemas, response_schemas

OPENAPI_VERSION = "3.1.0"

_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "additionalProperties": False,
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    400: "The request can never be served as it is; the message names what is wrong.",
    401: "No valid API key came with the request.",
    404: "Another model is served here.",
    408: "The request did not come whole in time.",
    413: "The body is larger than the server accepts.",
    429: "Too many requests wait.",
    500: "The server failed on this request.",
    503: "The model loads, the server shuts down, the engine has failed, or there are too many connections.",
}
_WORK_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503)
_TEXT_ERRORS = (400, 401, 404, 408, 413, 500, 503)


@dataclass(frozen=True)
class Operation:
    """One route, for one method.

    Attributes:
        request: models of the body; it has to fit one.
        response: model of the JSON answer, or its schema.
        media_type: of the answer.
        streams: whether the answer may come as an event stream.
        parameters: names of what stands in the path.
    """

    path: str
    method: str
    summary: str
    response: type[BaseModel] | Schema
    errors: tuple[int, ...]
    request: tuple[type[BaseModel], ...] = ()
    media_type: str = "application/json"
    streams: bool = False
    parameters: tuple[str, ...] = ()


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "/v1/chat/completions", "post", "Answer a conversation.", ChatCompletion, _WORK_ERRORS,
        request=(ChatCompletionRequest,), streams=True,
    ),
    Operation(
        "/v1/completions", "post", "Continue prompts.", Completion, _WORK_ERRORS,
        request=(CompletionRequest,), streams=True,
    ),
    Operation(
        "/v1/responses", "post", "Answer a conversation, the newer way.", ResponseObject, _WORK_ERRORS,
        request=(ResponsesRequest,), streams=True,
    ),
    Operation(
        "/tokenize", "post", "Token ids of a text or a conversation.", Tokens, _TEXT_ERRORS,
        request=(TokenizeTextRequest, TokenizeChatRequest),
    ),
    Operation(
        "/detokenize", "post", "The text of token ids.", DetokenizedText, _TEXT_ERRORS, request=(DetokenizeRequest,)
    ),
    Operation("/v1/models", "get", "The model that is served.", ModelList, (401, 503)),
    Operation("/v1/models/{name}", "get", "A model by its name.", Model, (401, 404, 503), parameters=("name",)),
    Operation(
        "/health", "get", "Whether requests are served; needs no key.",
        _object(status={"const": "ok"}, device={"type": "string"}), (503,),
    ),
    Operation("/load", "get", "Requests that are being answered.", _object(server_load={"type": "integer"}), (401, 503)),
    Operation("/version", "get", "The server's version.", _object(version={"type": "string"}), (401, 503)),
    Operation(
        "/flush_cache", "post", "Forget what is kept of prompts; for administrators.",
        _object(freed_pages={"type": "integer"}), (401, 503),
    ),
    Operation("/stats", "get", "The engine's numbers, as JSON.", {"type": "object"}, (401, 503)),
    Operation(
        "/metrics", "get", "Metrics in Prometheus' text format.", {"type": "string"}, (401, 503), media_type="text/plain"
    ),
    Operation("/openapi.json", "get", "This description.", {"type": "object"}, (401, 503)),
)  # fmt: skip


def openapi_document(config: ServerConfig, version: str) -> dict[str, Any]:
    """The description of the server with this config."""
    requests = [model for operation in OPERATIONS for model in operation.request]
    responses = [operation.response for operation in OPERATIONS if isinstance(operation.response, type)]
    components: dict[str, Any] = {
        "schemas": {"Error": _ERROR, **response_schemas(responses), **request_schemas(requests)},
    }
    if config.api_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, with_keys=bool(config.api_keys))
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "jaxserve", "version": version, "description": "OpenAI's API, served with JAX."},
        "servers": [{"url": config.root_path or "/"}],
        "paths": paths,
        "components": components,
    }


def _operation(operation: Operation, *, with_keys: bool) -> dict[str, Any]:
    described: dict[str, Any] = {"summary": operation.summary, "responses": _responses(operation, with_keys=with_keys)}
    if operation.request:
        schemas = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in operation.request]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if operation.parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in operation.parameters
        ]
    if with_keys and 401 in operation.errors:
        described["security"] = [{"key": []}]
    return described


# Before version 3.2, the schema of an event stream is that of each event. Its data is JSON, but for a last `[DONE]`.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
    "additionalProperties": False,
}


def _responses(operation: Operation, *, with_keys: bool) -> dict[str, Any]:
    response = operation.response
    schema = {"$ref": f"#/components/schemas/{response.__name__}"} if isinstance(response, type) else response
    content: dict[str, Any] = {operation.media_type: {"schema": schema}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    request_id = {"x-request-id": {"schema": {"type": "string"}, "required": True}}
    responses: dict[str, Any] = {"200": {"description": "Done.", "content": content, "headers": request_id}}
    for status in operation.errors:
        if status == 401 and not with_keys:
            continue
        headers = dict(request_id)
        if status in (429, 503):
            headers["retry-after"] = {"schema": {"type": "string"}, "required": True}
        responses[str(status)] = {
            "description": _ERRORS[status],
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            "headers": headers,
        }
    return responses

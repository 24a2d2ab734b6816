"""The list of served models in the form that Anthropic's client reads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.datastructures import QueryParams
from starlette.responses import Response

from ...sdk.errors import FieldInvalid
from ..net.bodies import json_answer
from ..service import Service

MOST_LISTED = 1_000


class ModelInfo(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="model"):
    """One name of the served model. ``max_input_tokens``, ``max_tokens``: both the size of the model's context,
    which the prompt and the reply share; None while it loads."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    lifecycle: str = "active"


class ModelPage(msgspec.Struct, kw_only=True, frozen=True):
    """One page of the names of the served model. ``has_more``: there are further names beyond the page, in the
    direction that the client asked for."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ModelsQuery(msgspec.Struct, kw_only=True, frozen=True):
    """The parameters of the URL; only clients with the header `anthropic-version` have them."""

    limit: Annotated[int, Meta(ge=1, le=MOST_LISTED, description="The most names of a page.")] = 20
    after_id: Annotated[str | None, Meta(description="The page begins behind this name.")] = None
    before_id: Annotated[str | None, Meta(description="The page ends before this name.")] = None


def models_page(service: Service, query: QueryParams) -> Response:
    """The answer of ``GET /v1/models`` for Anthropic's client: at most ``limit`` names behind ``after_id``, or
    just before ``before_id``. Raises ``FieldInvalid``."""
    limit, names = _limit(query.get("limit", "20")), service.listed
    wanted = [*query.getlist("lifecycle"), *query.getlist("lifecycle[]")]
    if wanted and "active" not in wanted:
        names = []
    if (after := query.get("after_id")) is not None:
        names = names[_index(names, after, "after_id") + 1 :]
        chosen = names[:limit]
    elif (before := query.get("before_id")) is not None:
        names = names[: _index(names, before, "before_id")]
        chosen = names[-limit:]
    else:
        chosen = names[:limit]
    page = ModelPage(
        data=[_info(service, name) for name in chosen],
        has_more=len(chosen) < len(names),
        first_id=chosen[0] if chosen else None,
        last_id=chosen[-1] if chosen else None,
    )
    return json_answer(page)


def model_info(service: Service, name: str) -> Response:
    """The answer of ``GET /v1/models/{name}`` for Anthropic's client. The name was checked before."""
    return json_answer(_info(service, name))


def _info(service: Service, name: str) -> ModelInfo:
    created = datetime.fromtimestamp(service.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    most = service.context
    return ModelInfo(id=name, display_name=name, created_at=created, max_input_tokens=most, max_tokens=most)


def _limit(given: str) -> int:
    if not (given.isdecimal() and len(given) <= 4 and 1 <= int(given) <= MOST_LISTED):
        raise FieldInvalid(f"`limit` must be an integer from 1 to {MOST_LISTED}", "limit")
    return int(given)


def _index(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise FieldInvalid(f"`{param}` is no model of this server", param)
    return names.index(name)

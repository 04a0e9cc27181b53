"""The HTTP calls of a service, by FastAPI."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
import tomllib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from fastapi import FastAPI, Request, Response
from jinja2 import Environment, StrictUndefined
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.label_holder.run_metrics import Surroundings
from vfl_flower.tasks.inference import reasons
from vfl_flower.tasks.inference.serving import requests
from vfl_flower.tasks.inference.serving.loaded import Loaded
from vfl_flower.tasks.inference.serving.people import Person
from vfl_flower.tasks.inference.serving.requests import Answers, UnavailableError
from vfl_flower.tasks.inference.serving.service import Service
from vfl_flower.tasks.inference.serving.turns import Explaining, apart
from vfl_flower.transport.http.guard import Guard
from vfl_flower.transport.http.tokens import Tokens
from vfl_flower.transport.nodes.gate import LogBudget

log = logging.getLogger("flwr.serving")
log.addFilter(LogBudget())

_ONE_OF = 'The body must have exactly one of "ids" and "people". Send {"ids": ["u1", "u2"]}.'
_RETRY = {"Retry-After": "1"}
_AT_ONCE = 1000  # scores that are written at a time
_RECORDED = (422, 429)  # refusals that have a line each in the audit log
_OPEN = ("/healthz", "/readyz", "/docs", "/openapi.json")

_Whole = Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)]  # an answer holds 64 bits
_Id = Annotated[_Whole | Annotated[StrictStr, Field(max_length=1000)], Field()]


_Cell = _Id | StrictBool | StrictFloat | None


class Query(BaseModel):
    """The ids to score: whole numbers or texts, as in the label holder's file.

    If people have no common id, ``people`` can take the place of ``ids``: rows as in the label
    holder's file, of people in it or not. `GET /v1/model` names their columns. Null is a missing
    value.

    With ``explain``, each score has the contributions of the participants. `GET /v1/model` has the
    most ids of such a request, as ``explain_ids``. "columns" adds the reasons by columns.
    """

    model_config = ConfigDict(extra="forbid")
    ids: list[_Id] = Field([], min_length=1, max_length=requests.MOST_IDS, examples=[["u1", "u2"]])
    people: list[dict[str, _Cell]] = Field([], min_length=1, max_length=requests.MOST_IDS)
    explain: StrictBool | Literal["columns"] = False


class Prediction(BaseModel):
    """The score of one id or person.

    ``id`` of a person is the id in its row, or the number of the row in the request, from 0.
    ``prediction`` is null if the model has no score for the id. ``parties`` are those whose data
    are in the score. ``missing`` names every other party that was asked, and why: "unknown" (it has
    no such id or person), "down", "late", "refused" by one of its rules, "faulty" or
    "inconsistent". It names the "label holder" if its file has no such id ("unknown"). For a
    person, it does so if the file has several with the same key ("ambiguous"), or if no rule has
    all its columns ("incomplete"). ``inconsistent`` is the party whose embedding does not fit the
    others'. It is null if all fit, or if the service does not compare them.

    The other fields are there if the request asks to explain the scores. ``contributions`` has
    the Shapley value of each party in ``parties``, and of the "label holder" if the model reads its
    columns. ``errors`` has their standard errors. ``base`` + the sum of ``contributions`` =
    ``score``. ``scale`` is "log-odds before calibration", of ``explained_class``, or "units of the
    label". Of two classes, the second one is explained. Of more, the predicted one is. With
    "columns", ``reasons`` has what each party tells of its columns, and all columns of the "label
    holder". ``no_reasons`` says why a party has none.
    """

    id: int | str
    prediction: int | float | str | bool | None
    probabilities: dict[str, float] | None = None
    parties: list[int]
    missing: dict[str, str]
    inconsistent: int | None = None
    contributions: dict[str, float] | None = None
    errors: dict[str, float] | None = None
    base: float | None = None
    score: float | None = None
    scale: str | None = None
    explained_class: str | None = None
    reasons: dict[str, list[dict[str, Any]]] | None = None
    no_reasons: dict[str, str] | None = None


class Answer(BaseModel):
    """The answer to a request. Its name is in the audit log too."""

    request: str
    model: str
    predictions: list[Prediction]


class _Scoring:
    """The call that scores ids."""

    def __init__(self, service: Service) -> None:
        self._service, self._explaining = service, Explaining()

    async def predict(self, call: Request) -> Response:
        """Score ids by the current model."""
        service = self._service
        began, name, caller = time.monotonic(), secrets.token_hex(8), call.scope["vfl_caller"]
        ids: requests.Ids = []
        outcome, found, reply = "failed", None, Response()
        write: Callable[[], None] | None = None
        try:
            try:
                query = Query.model_validate_json(await call.body())
                if bool(query.ids) == bool(query.people):
                    raise UnavailableError(_ONE_OF, "invalid", 422, retry=0)
                if query.explain:
                    _check_explained(query, service.loaded)
                ids = query.ids or await _people(query, service.loaded)
                with self._explaining.counted(caller) if query.explain else nullcontext():
                    found = await service.answer(requests.Request(name, caller, ids, query.explain))
                    if found.explain:
                        await self._explaining.run(caller, found.explain)
                outcome, reply = "answered", await apart(_answer, ids, name, found)
            except ValidationError as error:
                outcome, reply = "invalid", _refusal(422, _sentence(error), name)
            except UnavailableError as error:
                headers = {"Retry-After": str(error.retry)} if error.retry else None
                outcome, reply = error.outcome, _refusal(error.status, str(error), name, headers)
            except VflError as error:
                reply = _refusal(500, str(error), name)
            except Exception:
                log.exception("The service failed to answer.")
                reply = _refusal(500, requests.FAILED, name)
            write = await apart(service.line, ids, name, caller, found, outcome)
            await service.recording.run(caller, write)
        except VflError as error:
            log.error("%s", error)
            sentence = "The audit log cannot be written, so nothing is answered."
            outcome = outcome if outcome == "invalid" else "failed"
            reply = _refusal(503, sentence, name, _RETRY)
        except asyncio.CancelledError:  # the service ends, and waits no longer
            with suppress(VflError):
                (write or service.line(ids, name, caller, found, outcome))()
            raise
        if outcome != "invalid":
            service.metrics.requests.labels(outcome).inc()
            service.metrics.rows.labels(outcome).inc(len(ids))
            service.metrics.request_seconds.observe(time.monotonic() - began)
        return reply


def app_of(service: Service, tokens: Tokens) -> Guard:
    """Return the web application of a service."""
    app = FastAPI(
        title="vfl-flower scores",
        description="Scores of a vertical model. Send the token as `Authorization: Bearer TOKEN`.",
        docs_url=None,  # FastAPI's page loads scripts from other hosts
        redoc_url=None,
        openapi_url=None,  # FastAPI would write the description anew for each call
        redirect_slashes=False,  # a redirect goes to the host that the caller names
    )
    body = {"content": {"application/json": {"schema": Query.model_json_schema()}}}
    about_call: Any = {"openapi_extra": {"requestBody": body}, "summary": "Score ids"}
    app.post("/v1/predict", response_model=Answer, **about_call)(_Scoring(service).predict)

    @app.get("/v1/model", summary="The model in service")
    async def about() -> dict[str, Any]:
        """Return strategy, training figures, classes, and the parties that answer now."""
        return service.about()

    @app.get("/healthz", summary="Whether the process is up")
    async def healthz() -> dict[str, str]:
        """Answer "ok"."""
        return {"status": "ok"}

    @app.get("/readyz", summary="Whether a request would be answered now")
    async def readyz() -> Response:
        """Answer 200 if enough parties are connected and the tokens can be read, else 503."""
        ready = service.is_ready and tokens.are_usable()
        said = {"status": "ready" if ready else "not ready"}
        return Response(orjson.dumps(said), 200 if ready else 503, media_type="application/json")

    @app.get("/metrics", summary="Figures for Prometheus")
    async def metrics() -> Response:
        """Return counters and histograms."""
        return Response(service.metrics.exposition(), media_type=service.metrics.content_type)

    _describe_calls(app)

    def answered(status: int, caller: str) -> None:
        service.metrics.answers.labels(str(status)).inc()
        if 400 <= status < 500 and status not in _RECORDED:
            service.refusals.count(status, caller)

    guard = Guard(app, tokens, _OPEN, answered)
    folder = Path(service.loaded.config.model).expanduser()  # it has the audit log too
    service.metrics.watch(Surroundings(folder, guard))
    return guard


def _describe_calls(app: FastAPI) -> None:
    """Add a page about the calls, and their description for programs."""
    page, about_calls = _page(app.openapi()), orjson.dumps(app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(page, media_type="text/html")

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(about_calls, media_type="application/json")


async def _people(query: Query, loaded: Loaded) -> list[Person]:
    """Return the people of a query, or raise `UnavailableError`."""
    try:
        if loaded.people is None:
            raise ConfigError("This model finds nobody by columns. Send ids.")
        if loaded.releases.counts:  # rows that differ may be one person, whose releases add up
            raise ConfigError(
                "This model has noise, and its epsilon counts the scores of each person. A person "
                "described by columns cannot be counted. Send ids."
            )
        return await asyncio.to_thread(loaded.people.of, query.people)
    except ConfigError as error:
        raise UnavailableError(str(error), "invalid", 422, retry=0) from None


def _check_explained(query: Query, loaded: Loaded) -> None:
    """Raise `UnavailableError` if this model has no contributions for so many ids."""
    sentence, most = loaded.explainer.refusal, loaded.explainer.most_ids
    sentence = reasons.refusal(loaded.explainer) if query.explain == "columns" else sentence
    if not sentence and len(query.ids or query.people) > most:
        sentence = f"With explain, a request to this model has at most {most} ids. Send several."
    if sentence:
        raise UnavailableError(sentence, "invalid", 422, retry=0)


def _answer(ids: requests.Ids, name: str, found: Answers) -> Response:
    """Return the answer, written in pieces: orjson lets no other thread run meanwhile."""
    head = orjson.dumps({"request": name, "model": found.model})[:-1]
    said = list[bytes]()
    for at in range(0, len(ids), _AT_ONCE):
        pairs = zip(ids[at : at + _AT_ONCE], found.scores[at : at + _AT_ONCE], strict=True)
        named = ((one.name if isinstance(one, Person) else one, score) for one, score in pairs)
        said.append(orjson.dumps([{"id": name, **score} for name, score in named])[1:-1])
    body = b'%b,"predictions":[%b]}' % (head, b",".join(said))
    return Response(body, media_type="application/json")


def _refusal(
    status: int, sentence: str, request: str, headers: dict[str, str] | None = None
) -> Response:
    said = {"request": request, "error": sentence}
    return Response(orjson.dumps(said), status, headers, media_type="application/json")


def _page(about: dict[str, Any]) -> str:
    """Return an OpenAPI description as a page of plain HTML, with examples and without scripts."""
    file = Path(__file__).with_name("docs.toml")  # Flower packs no files of templates
    pages = Environment(autoescape=True, undefined=StrictUndefined)
    pages.filters["json"] = partial(json.dumps, indent=2)
    template = tomllib.loads(file.read_text(encoding="utf-8"))["page"]
    return pages.from_string(template).render(about=about)


def _sentence(error: ValidationError) -> str:
    """Say what is wrong with a query, without its content."""
    first = error.errors(include_input=False, include_url=False)[0]
    kind = first["type"]
    if kind == "too_long":
        return f"A request has at most {requests.MOST_IDS} ids. Send several requests."
    if first["loc"][:1] == ("people",):
        return (
            "people must be rows of columns, with texts of at most 1000 letters, numbers of 64 "
            "bits, true, false or null. Correct them."
        )
    if first["loc"][:1] == ("explain",):
        return 'explain must be true, false or "columns". Send one of them, or leave it out.'
    if kind in ("greater_than_equal", "less_than"):
        return "A whole number is an id only if it has at most 64 bits. Leave out the others."
    if kind.startswith("json"):
        return 'The body is not JSON. Send {"ids": ["u1", "u2"]}.'
    return 'The body must be {"ids": [...]}, with at least one whole number or text.'

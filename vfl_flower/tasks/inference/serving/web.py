"""The HTTP calls of a service, by FastAPI."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)

from vfl_flower.config.errors import VflError
from vfl_flower.label_holder.run_metrics import Surroundings
from vfl_flower.tasks.inference.serving import requests
from vfl_flower.tasks.inference.serving.explaining import Explaining
from vfl_flower.tasks.inference.serving.loaded import Loaded
from vfl_flower.tasks.inference.serving.requests import Answers, UnavailableError
from vfl_flower.tasks.inference.serving.service import Service
from vfl_flower.tasks.inference.serving.turns import apart
from vfl_flower.transport.http.guard import Guard
from vfl_flower.transport.http.tokens import Tokens
from vfl_flower.transport.nodes.gate import LogBudget

log = logging.getLogger("flwr.serving")
log.addFilter(LogBudget())

_RETRY = {"Retry-After": "1"}
_FAILED = "The service failed. Its log says why."
_RECORDED = (422, 429)  # refusals that have a line each in the audit log
_OPEN = ("/healthz", "/readyz", "/docs", "/openapi.json")

_Whole = Annotated[StrictInt, Field(ge=-(2**63), lt=2**64)]  # an answer holds 64 bits
_Id = Annotated[_Whole | Annotated[StrictStr, Field(max_length=1000)], Field()]


class Query(BaseModel):
    """The ids to score: whole numbers or texts, as in the label holder's file.

    With ``explain``, each score has the contributions of the participants. `GET /v1/model` has the
    most ids of such a request, as ``explain_ids``.
    """

    model_config = ConfigDict(extra="forbid")
    ids: list[_Id] = Field(min_length=1, max_length=requests.MOST_IDS, examples=[["u1", "u2"]])
    explain: StrictBool = False


class Prediction(BaseModel):
    """The score of one id.

    ``prediction`` is null if the model has no score for the id. ``parties`` are those whose data
    are in the score. ``missing`` names every other party, and why: "unknown" (it has no such id),
    "down", "late", "refused" by one of its rules, or "faulty".

    The last five fields are there if the request asks to explain the scores. ``contributions`` has
    the Shapley value of each party in ``parties``, and of the "label holder" if the model reads its
    columns. ``base`` + the sum of ``contributions`` = ``score``. ``scale`` is "log-odds before
    calibration", of ``explained_class``, or "units of the label". Of two classes, the second one is
    explained. Of more, the predicted one is.
    """

    id: int | str
    prediction: int | float | str | bool | None
    probabilities: dict[str, float] | None = None
    parties: list[int]
    missing: dict[str, str]
    contributions: dict[str, float] | None = None
    base: float | None = None
    score: float | None = None
    scale: str | None = None
    explained_class: str | None = None


class Answer(BaseModel):
    """The answer to a request. Its name is in the audit log too."""

    request: str
    model: str
    predictions: list[Prediction]


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
    explaining = Explaining()
    body = {"content": {"application/json": {"schema": Query.model_json_schema()}}}

    @app.post(
        "/v1/predict",
        response_model=Answer,
        openapi_extra={"requestBody": body},
        summary="Score ids",
    )
    async def predict(call: Request) -> Response:
        """Score ids by the current model."""
        began, name, caller = time.monotonic(), secrets.token_hex(8), call.scope["vfl_caller"]
        ids: requests.Ids = []
        outcome, reply, found = "failed", _refusal(500, _FAILED, name), None
        try:
            query = Query.model_validate_json(await call.body())
            if problem := _problem(query, service.loaded):
                outcome, reply = "invalid", _refusal(422, problem, name)
            else:
                ids = query.ids
                with explaining.counted(caller, query.explain):
                    found = await scored(name, caller, query)
                    await explaining.run(caller, found.explain)
                outcome, reply = "answered", await apart(_answer, ids, name, found)
        except ValidationError as error:
            outcome, reply = "invalid", _refusal(422, _sentence(error), name)
        except UnavailableError as error:
            outcome = error.outcome
            reply = _refusal(error.status, str(error), name, {"Retry-After": str(error.retry)})
        except VflError as error:
            reply = _refusal(500, str(error), name)
        except asyncio.CancelledError:  # the service ends, and waits no longer
            with suppress(VflError):
                service.line(ids, name, caller, found, outcome)()
            raise
        except Exception:
            log.exception("The service failed to answer.")
        unwritten = await _record(ids, service, name, caller, found, outcome)
        if outcome != "invalid":
            _count(service, "failed" if unwritten else outcome, len(ids), began)
        return unwritten or reply

    async def scored(name: str, caller: str, query: Query) -> Answers:
        """Return the scores of a query, or raise `VflError`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answers] = loop.create_future()

        def answer(found: Answers | Exception) -> None:
            loop.call_soon_threadsafe(_settle, future, found)

        await service.admit(requests.Request(name, caller, query.ids, answer, query.explain))
        return await future

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

    page, about_calls = _page(app.openapi()), orjson.dumps(app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """Return a page about the calls."""
        return Response(page, media_type="text/html")

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """Return the description of the calls for programs."""
        return Response(about_calls, media_type="application/json")

    def answered(status: int, caller: str) -> None:
        service.metrics.answers.labels(str(status)).inc()
        if 400 <= status < 500 and status not in _RECORDED:
            service.refusals.count(status, caller)

    guard = Guard(app, tokens, _OPEN, answered)
    folder = Path(service.loaded.config.model).expanduser()  # it has the audit log too
    service.metrics.watch(Surroundings(folder, guard))
    return guard


def _problem(query: Query, loaded: Loaded) -> str:
    """Return why this model cannot answer a query, or an empty text."""
    if not query.explain:
        return ""
    most = loaded.explainer.most_ids
    if not loaded.explainer.refusal and len(query.ids) > most:
        return f"With explain, a request to this model has at most {most} ids. Send several."
    return loaded.explainer.refusal


def _answer(ids: requests.Ids, name: str, found: Answers) -> Response:
    pairs = zip(ids, found.scores, strict=True)
    predictions = [{"id": one, **score} for one, score in pairs]
    said = {"request": name, "model": found.model, "predictions": predictions}
    return Response(orjson.dumps(said), media_type="application/json")


def _settle(future: asyncio.Future[Answers], found: Answers | Exception) -> None:
    if future.done():  # the caller has gone
        return
    if isinstance(found, VflError):
        future.set_exception(found)
    elif isinstance(found, Exception):
        future.set_exception(VflError(_FAILED))
    else:
        future.set_result(found)


async def _record(
    ids: requests.Ids,
    service: Service,
    name: str,
    caller: str,
    found: Answers | None,
    outcome: str,
) -> Response | None:
    """Write a request to the audit log; return a refusal if that is not possible."""
    try:
        write = await apart(service.line, ids, name, caller, found, outcome)
        await service.recording.run(caller, write)
    except VflError as error:
        log.error("%s", error)
        sentence = "The audit log cannot be written, so nothing is answered."
        return _refusal(503, sentence, name, _RETRY)
    return None


def _count(service: Service, outcome: str, ids: int, began: float) -> None:
    service.metrics.requests.labels(outcome).inc()
    service.metrics.rows.labels(outcome).inc(ids)
    service.metrics.request_seconds.observe(time.monotonic() - began)


def _refusal(
    status: int, sentence: str, request: str, headers: dict[str, str] | None = None
) -> Response:
    said = {"request": request, "error": sentence}
    return Response(orjson.dumps(said), status, headers, media_type="application/json")


_CURL = "curl -H \"Authorization: Bearer $TOKEN\" -d '{}' $URL/v1/predict"
_PYTHON = """import os
from vfl_flower.client import Scores

with Scores(os.environ["URL"], os.environ["TOKEN"]) as scores:
    print(scores.predict({}))"""
_OF_U1 = {
    **{"id": "u1", "prediction": "yes", "probabilities": {"no": 0.18, "yes": 0.82}},
    **{"parties": [0, 1], "missing": {}},
}
_OF_U2 = {
    **{"id": "u2", "prediction": None, "probabilities": None},
    **{"parties": [], "missing": {"0": "unknown", "1": "unknown"}},
}
_NAMES = {"request": "6d1f0c2ab94e57f3", "model": "1234-5678/3"}
_EXAMPLES = {  # title -> in a shell, in Python, and an answer
    "Score one id": (
        _CURL.format('{"ids": ["u1"]}'),
        _PYTHON.format('["u1"]'),
        {**_NAMES, "predictions": [_OF_U1]},
    ),
    "Score a batch": (
        _CURL.format('{"ids": ["u1", "u2"]}'),
        _PYTHON.format('["u1", "u2"]'),
        {**_NAMES, "predictions": [_OF_U1, _OF_U2]},
    ),
    "Ask whether the service is up": (
        "curl $URL/healthz",
        'import os\nimport httpx\n\nprint(httpx.get(os.environ["URL"] + "/healthz").json())',
        {"status": "ok"},
    ),
}


def _page(about: dict[str, Any]) -> str:
    """Return an OpenAPI description as a page of plain HTML, with examples and without scripts."""
    info = about["info"]
    said = re.sub("`(.+?)`", r"<code>\1</code>", escape(info["description"]))
    parts = [
        f"<h1>{escape(info['title'])}</h1><p>{said}</p>",
        "<p>The examples read the address and your token from the environment variables <code>URL"
        "</code> and <code>TOKEN</code>. Ids and answers are made up. <code>Scores.predict</code> "
        "returns <code>predictions</code>.</p>",
    ]
    for title, (shell, python, answer) in _EXAMPLES.items():
        shown = {"In a shell": shell, "In Python": python, "Answer": json.dumps(answer, indent=2)}
        parts.append(f"<h2>{title}</h2>")
        parts += [f"<h3>{each}</h3><pre>{escape(text)}</pre>" for each, text in shown.items()]
    for path, calls in about["paths"].items():
        for method, call in calls.items():
            parts.append(
                f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(call['summary'])}.</p>"
            )
            if "requestBody" in call:
                schema = call["requestBody"]["content"]["application/json"]["schema"]
                parts.append(f"<p>The body:</p><pre>{escape(json.dumps(schema, indent=2))}</pre>")
    schemas = escape(json.dumps(about["components"]["schemas"], indent=2))
    parts.append(f"<h2>Answers</h2><pre>{schemas}</pre>")
    parts.append('<p>The same for programs: <a href="/openapi.json">/openapi.json</a></p>')
    style = (
        "body { font-family: sans-serif; max-width: 50em; margin: 2em auto; padding: 0 1em } "
        "pre { padding: .7em; background: #8882; overflow-x: auto } h3 { font-size: 1em } "
        ":root { color-scheme: light dark }"
    )
    head = (
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(info['title'])}</title><style>{style}</style>"
    )
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _sentence(error: ValidationError) -> str:
    """Say what is wrong with a query, without its content."""
    first = error.errors(include_input=False, include_url=False)[0]
    kind = first["type"]
    if kind == "too_long":
        return f"A request has at most {requests.MOST_IDS} ids. Send several requests."
    if first["loc"][:1] == ("explain",):
        return "explain must be true or false. Send one of them, or leave it out."
    if kind in ("greater_than_equal", "less_than"):
        return "A whole number is an id only if it has at most 64 bits. Leave out the others."
    if kind.startswith("json"):
        return 'The body is not JSON. Send {"ids": ["u1", "u2"]}.'
    return 'The body must be {"ids": [...]}, with at least one whole number or text.'

"""deploy/Dockerfile and deploy/compose.yaml as data, for tests without a container engine."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).parents[1]
DEPLOY = CHECKOUT / "deploy"
CREDENTIALS, DATA, TMP = "/run/secrets", "/data", "/tmp"


@dataclass
class Stage:
    """A stage of a Dockerfile, with all that it inherits from the stage that it starts from."""

    image: str
    user: str = ""
    folder: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    volumes: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)  # from the checkout
    runs: list[str] = field(default_factory=list)


def stages(text: str) -> dict[str, Stage]:
    """Return the stages of a Dockerfile by name. It must use the JSON form of commands."""
    found: dict[str, Stage] = {}
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            image, _, name = rest.partition(" AS ")
            base = found.get(image, Stage(image))
            found[name] = now = Stage(**{key: _copy(value) for key, value in vars(base).items()})
        elif word == "USER":
            now.user = rest
        elif word == "WORKDIR":
            now.folder = rest
        elif word == "ENV":
            now.environment |= dict(pair.split("=", 1) for pair in rest.split())
        elif word == "VOLUME":
            now.volumes = json.loads(rest)
        elif word == "ENTRYPOINT":
            now.entrypoint = json.loads(rest)
        elif word == "HEALTHCHECK":
            now.healthcheck = json.loads(rest.partition(" CMD ")[2])
        elif word == "COPY" and "--from=" not in rest:
            now.copies += rest.split()[:-1]
        elif word == "RUN":
            now.runs.append(rest)
    return found


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, (list, dict)) else value


STAGES = stages((DEPLOY / "Dockerfile").read_text())
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def stage_of(service: dict[str, Any]) -> Stage:
    """Return the stage that a service's image is built from."""
    return STAGES[service["build"]["target"]]


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Return path in the container -> volume, and whether the volume is read-only there."""
    found = {}
    for each in service.get("volumes", ()):
        volume, path, *how = each.split(":")
        found[path] = volume, how == ["ro"]
    return found


def command(service: dict[str, Any]) -> list[str]:
    """Return what a service runs, without the image's init."""
    words = [*service.get("entrypoint", stage_of(service).entrypoint), *service.get("command", ())]
    assert words[:2] == ["tini", "--"]
    return words[2:]


def health(service: dict[str, Any]) -> list[str]:
    """Return the command that tells whether a service is healthy; empty if there is none."""
    own = service.get("healthcheck", {})
    if own.get("disable"):
        return []
    return own["test"][1:] if own else stage_of(service).healthcheck


def in_order() -> list[str]:
    """Return the services in an order in which each comes after those that it depends on."""
    order: list[str] = []
    while len(order) < len(SERVICES):
        order += [
            name
            for name, service in SERVICES.items()
            if name not in order and set(service.get("depends_on", ())) <= set(order)
        ]
    return order

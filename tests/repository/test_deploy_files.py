"""Files for containers, Kubernetes and systemd: linters read them, and what linters do not see."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.containers import (
    CHECKOUT,
    COMPOSE,
    CREDENTIALS,
    DATA,
    DEPLOY,
    SERVICES,
    STAGES,
    TMP,
    command,
    in_order,
    mounts,
    stage_of,
)
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.run_config import KEYS, pairs, parse

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
VERSION = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["version"]
ROLES = {"label-holder": "/results", "party": "/keys"}  # and a folder that each writes
SERVING = ("serve-address", "serve-certificate", "serve-key", "serve-token")


def ran(*words: str | Path, folder: Path = CHECKOUT) -> subprocess.CompletedProcess[str]:
    """Run a linter; skip the test if the linter is missing."""
    tool = shutil.which(words[0], path=PATH)
    if not tool:
        pytest.skip(f"{words[0]} is missing")
    return subprocess.run([tool, *words[1:]], cwd=folder, capture_output=True, text=True)


# --- images -------------------------------------------------------------------------------------


MEANT = "--exclude=SC1007,SC2174"  # `CDPATH= cd`, and `mkdir -p -m`: the umask protects parents
LINTED: dict[str, tuple[list[str], list[Path], str]] = {
    "Dockerfile": (
        *(["hadolint"], [DEPLOY / "Dockerfile"], "FROM python:latest\nRUN cd /x\nCMD python\n"),
    ),
    "bad.sh": (
        *(["shellcheck", MEANT], sorted(DEPLOY.glob("*.sh")), "#!/bin/bash\nrm -rf $1/*\n"),
    ),
}


@pytest.mark.parametrize("name", LINTED)
def test_a_linter_finds_nothing_in_the_dockerfile_and_the_scripts(
    name: str, tmp_path: Path
) -> None:
    linter, files, text = LINTED[name]
    found = ran(*linter, *files)
    assert found.returncode == 0, found.stdout
    (tmp_path / name).write_text(text)
    assert ran(*linter, tmp_path / name).returncode != 0  # the control


def test_an_image_is_pinned_installed_by_hashes_and_runs_as_no_root() -> None:
    for stage in STAGES.values():
        assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", stage.image)
    for name in (*ROLES, "example"):
        assert STAGES[name].user == "10001:10001"
        assert STAGES[name].healthcheck[:2] == ["python", "-P"]
        assert STAGES[name].entrypoint[:2] == ["tini", "--"]
    [installs] = [each for each in STAGES["build"].runs if "requirements.txt" in each]
    assert "--require-hashes" in installs and "--only-binary :all:" in installs
    assert not any("--no-compile" in each for each in STAGES["build"].runs)
    assert not any("gcc" in each or "build-essential" in each for each in STAGES["base"].runs)


def test_an_image_copies_what_is_there_and_no_more_than_its_context_has() -> None:
    lines = (CHECKOUT / ".dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert "*" in lines
    for stage in STAGES.values():
        for source in stage.copies:
            assert (CHECKOUT / source).exists(), source
            assert any(fnmatch(source, each) or source.startswith(f"{each}/") for each in kept)
    scripts = {source for stage in STAGES.values() for source in stage.copies}
    assert all(os.access(CHECKOUT / each, os.X_OK) for each in scripts if each.endswith(".sh"))


# --- compose ------------------------------------------------------------------------------------


def test_the_compose_file_follows_the_specification(tmp_path: Path) -> None:
    schema = ("--builtin-schema", "vendor.compose-spec")
    found = ran("check-jsonschema", *schema, DEPLOY / "compose.yaml")
    assert found.returncode == 0, found.stdout
    bad = tmp_path / "compose.yaml"
    bad.write_text((DEPLOY / "compose.yaml").read_text().replace("read_only: true", "read_only: 3"))
    assert ran("check-jsonschema", *schema, bad).returncode != 0  # the control


def test_docker_reads_the_compose_file() -> None:
    if ran("docker", "compose", "version").returncode:
        pytest.skip("docker has no compose")
    found = ran("docker", "compose", "--file", DEPLOY / "compose.yaml", "config", "--quiet")
    assert found.returncode == 0, found.stderr


def test_services_of_the_compose_file_have_no_rights_that_they_do_not_need() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert not {"privileged", "cap_add", "user", "devices", "pid", "ipc"} & service.keys()
        assert {"cpus", "memory", "pids"} <= service["deploy"]["resources"]["limits"].keys()
        assert service["image"] == f"vfl-flower-{service['build']['target']}:{VERSION}"
        assert [each.partition(":")[0] for each in service["tmpfs"]] == [TMP]
        writable = {path for path, (_, read_only) in mounts(service).items() if not read_only}
        if name != "setup":
            assert writable == set(stage_of(service).volumes), name
            assert mounts(service).keys() - writable == {DATA, CREDENTIALS}
    assert {volume for each in SERVICES.values() for volume, _ in mounts(each).values()} == set(
        COMPOSE["volumes"]
    )
    assert [name for name in SERVICES if "ports" in SERVICES[name]] == ["label-holder"]
    assert SERVICES["label-holder"]["ports"] == ["127.0.0.1:8443:8443"]


def test_parties_of_the_compose_file_reach_the_label_holder_alone() -> None:
    holder = SERVICES["label-holder"]
    parties = [SERVICES[f"party-{party}"] for party in range(2)]
    networks = [set(each["networks"]) for each in parties]
    assert not networks[0] & networks[1]
    for each in networks:
        assert each < set(holder["networks"])
        assert all(COMPOSE["networks"][name] == {"internal": True} for name in each)
    volumes = [{volume for volume, _ in mounts(each).values()} for each in (*parties, holder)]
    assert not volumes[0] & volumes[1] and not volumes[0] & volumes[2]


def test_services_start_in_order_and_wait_for_what_can_be_waited_for() -> None:
    assert in_order() == ["setup", "label-holder", "party-0", "party-1", "train", "serve"]
    for service in SERVICES.values():
        for other, how in service.get("depends_on", {}).items():
            ends = other in ("setup", "train")
            wanted = "service_completed_successfully" if ends else "service_healthy"
            assert how["condition"] == wanted
            assert ends or not SERVICES[other].get("healthcheck", {}).get("disable")


# --- Kubernetes ---------------------------------------------------------------------------------

MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*/[!k]*.yaml"))


def documents(*files: Path) -> list[dict[str, Any]]:
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def pods(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for each in found:
        if each["kind"] == "CronJob":
            yield each["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        elif "template" in each.get("spec", {}):
            yield each["spec"]["template"]["spec"]


@pytest.mark.one_by_day
@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_manifests_follow_the_schemas_of_kubernetes(file: Path) -> None:
    newest = kubernetes_validate.latest_version()
    for each in documents(file):
        kubernetes_validate.validate(each, newest, strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**each, "spce": {}}, newest, strict=True)


@pytest.mark.parametrize("role", ROLES)
def test_kustomize_builds_the_manifests_with_pinned_images(role: str) -> None:
    found = ran("kubectl", "kustomize", DEPLOY / "kubernetes" / role)
    assert found.returncode == 0, found.stderr
    built = list(yaml.safe_load_all(found.stdout))
    assert len(built) > 4
    for each in containers(built):
        assert re.fullmatch(rf"registry\.\w+\.example/vfl-flower-{role}:{VERSION}", each["image"])
    placed = [each["metadata"] for each in built if each["kind"] != "Namespace"]
    assert all(each["namespace"] == "vfl" for each in placed)


def containers(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        each for pod in pods(found) for each in (*pod.get("initContainers", ()), *pod["containers"])
    ]


@pytest.mark.parametrize("role", ROLES)
def test_pods_have_no_rights_that_they_do_not_need(role: str) -> None:
    found = documents(*(DEPLOY / "kubernetes" / role).glob("[!k]*.yaml"))
    claims = {each["metadata"]["name"] for each in found if each["kind"].startswith("Persistent")}
    for pod in pods(found):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert f"{pod['securityContext']['runAsUser']}:10001" == STAGES[role].user
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        used = [each.get("persistentVolumeClaim", {}) for each in pod["volumes"]]
        assert {each["claimName"] for each in used if each} == claims
        for each in (*pod.get("initContainers", ()), *pod["containers"]):
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert each["image"] == f"vfl-flower-{role}"
            assert (
                "memory" in each["resources"]["limits"] and "cpu" in each["resources"]["requests"]
            )
            writable = {m["mountPath"] for m in each["volumeMounts"] if not m.get("readOnly")}
            assert writable <= {*STAGES[role].volumes, TMP}
            assert {"/keys", TMP} <= writable
            if each["name"] != "run":
                assert writable == {*STAGES[role].volumes, TMP}
                assert {"livenessProbe", "startupProbe"} <= each.keys()
    if role == "label-holder":  # training and service have the same SuperLink
        folder = DEPLOY / "kubernetes/label-holder"
        train, serve = pods(documents(folder / "train.yaml", folder / "serve.yaml"))
        assert train["initContainers"] == serve["initContainers"]
        assert train["volumes"] == serve["volumes"]
        assert train["initContainers"][0]["restartPolicy"] == "Always"
    policies = [each["spec"] for each in found if each["kind"] == "NetworkPolicy"]
    of_all = [each for each in policies if each["podSelector"] == {}]
    assert [each["policyTypes"] for each in of_all] == [["Ingress", "Egress"]]


# --- systemd ------------------------------------------------------------------------------------

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """The units, with the checkout in the place of an installation."""
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/vfl/app", str(CHECKOUT)))
    return sorted(tmp_path.glob("*.service"))


def test_systemd_reads_the_units_and_finds_them_closed(units: list[Path], tmp_path: Path) -> None:
    found = ran("systemd-analyze", "verify", *units)
    assert found.returncode == 0 and not found.stderr, found.stderr
    offline = ("security", "--offline=yes", "--threshold=15")
    for unit in units:
        assert ran("systemd-analyze", *offline, unit).returncode == 0, unit.name
    bad = tmp_path / "bad.service"
    bad.write_text("[Service]\nExecStart=/nowhere\nRestrat=always\n")
    assert ran("systemd-analyze", "verify", bad).returncode != 0  # the control
    assert ran("systemd-analyze", *offline, bad).returncode != 0


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_has_no_rights_that_it_does_not_need(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    for line in ("User=vfl", "ProtectSystem=strict", "NoNewPrivileges=yes", "PrivateTmp=yes"):
        assert line in lines
    assert {"Restart=on-failure", "UMask=0077", "CapabilityBoundingSet="} <= set(lines)
    assert any(line.startswith("StateDirectory=") for line in lines)
    secrets = re.findall(r"^LoadCredential=(\S+?):/etc/vfl/\1$", "\n".join(lines), re.MULTILINE)
    assert secrets or unit.stem == "vfl-serve"  # which needs no secret: the SuperLink reads them


# --- options ------------------------------------------------------------------------------------


def words() -> Iterator[str]:
    """The options that the files give to runs and to parties."""
    for service in SERVICES.values():
        yield " ".join(command(service))
    for each in containers(documents(*MANIFESTS)):
        yield " ".join(each.get("args", ()))
    for unit in UNITS:
        yield from re.findall(r'^Environment="\w+=(.*)"$', unit.read_text(), re.MULTILINE)


def pairs_in(text: str) -> dict[str, Any]:
    said = " ".join(re.findall(r"[a-z][a-z-]*=(?:'[^']*'|\d+)", text))
    return pairs([said.replace("$(JOB)", "1")], "deploy") if said else {}


def test_each_option_in_the_files_exists_and_can_have_its_value() -> None:
    found = [each for each in map(pairs_in, words()) if each]
    parties = [each for each in found if "partition-id" in each]
    runs = [each for each in found if "partition-id" not in each]
    assert (len(parties), len(runs)) == (4, 5)
    for each in parties:
        Rules.of(each)
    for each in runs:
        if each.get("task") == "serve":
            assert set(SERVING) < each.keys()
            if "serve-address" not in KEYS:  # until `vfl serve` is there
                each = {key: each[key] for key in each.keys() - {*SERVING, "task"}}
        parse(each)
    with pytest.raises(Exception, match="There is no option 'dataest'"):
        parse(pairs_in("dataest='files:/data/labels.csv' id='person'"))  # the control

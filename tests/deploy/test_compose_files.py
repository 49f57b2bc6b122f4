"""Checks the compose files without running them. tests/integration/deploy lets docker-compose read them."""

import json
import re
import runpy
import sys

import pytest
from pydantic_settings import BaseSettings

from collapipe.control_unit.app import ControlUnitSettings
from collapipe.device_agent.app import DeviceAgentSettings
from collapipe.edge_server.app import EdgeServerSettings
from collapipe.emulation.device_profiles import DEVICE_PROFILES
from collapipe.scheduler.app import SchedulerSettings

from .compose_files import COMPOSE, DEPLOY, LAYERS, STANDALONE, load_layer, load_services

SETTINGS: dict[str, type[BaseSettings]] = {
    "scheduler": SchedulerSettings,
    "edge-server": EdgeServerSettings,
    "control-unit": ControlUnitSettings,
    "device-agent": DeviceAgentSettings,
    "device-agent-cuda": DeviceAgentSettings,
    "device-agent-jetson": DeviceAgentSettings,
}
STAGE_HOSTS = ("edge-server", "control-unit", "device-agent")
"""Targets of the images of hosts whose links the netem layer shapes."""
ALL_LAYERS = ["compose.yaml", *(name for name in LAYERS if name not in STANDALONE)]
SERVICES = {
    **load_services(*ALL_LAYERS),
    **load_services("compose.jetson.yaml"),
}


def kind(service: str) -> str:
    """Returns the image of a service, without project and version."""
    return re.sub(r"^collapipe/|:.*$", "", SERVICES[service]["image"])


@pytest.mark.parametrize("service", SERVICES)
def test_every_container_has_limits_for_rights_memory_and_logs(service: str) -> None:
    described = SERVICES[service]
    # Only shaper processes may change the network of their host. Only the client may hand out keys, as root.
    shapes = {"NET_ADMIN", "SETUID", "SETGID", "KILL", "DAC_OVERRIDE"}
    rights = {"client": {"CHOWN", "DAC_OVERRIDE"}, **dict.fromkeys(STAGE_HOSTS, shapes)}
    allowed = rights.get(described.get("build", {}).get("target"), set())
    assert described["cap_drop"] == ["ALL"]
    assert set(described.get("cap_add", [])) <= allowed
    assert described["mem_limit"]
    assert described["logging"]["options"]["max-size"] == "10m"
    assert "no-new-privileges:true" in described["security_opt"]
    assert not described.get("privileged")


@pytest.mark.parametrize("service", [name for name in SERVICES if kind(name) in SETTINGS])
def test_every_service_is_read_only_and_has_a_health_check(service: str) -> None:
    described = SERVICES[service]
    assert described["read_only"]
    assert described["healthcheck"]["test"][-3:] == ["-I", "-m", "collapipe.health_check"]


UNSHAPED = load_services(*(name for name in ALL_LAYERS if name != "compose.netem.yaml"))


@pytest.mark.parametrize("service", [name for name in SERVICES if kind(name) in SETTINGS])
def test_every_service_runs_without_rights(service: str) -> None:
    for described in (SERVICES[service], UNSHAPED.get(service, {})):
        if described.get("user") is None:  # The image's own user has no rights.
            assert not described.get("cap_add") and not described.get("entrypoint")
            continue
        target = described["build"]["target"]
        assert described is SERVICES[service] and target in STAGE_HOSTS
        shaper = ["python", "-I", "-m", "collapipe.traffic_shaping", "--user", "collapipe"]
        assert described["entrypoint"] == [*shaper, *entrypoint(target)]


def entrypoint(target: str) -> list[str]:
    """Returns the entry point of an image."""
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    (stage,) = re.findall(rf"^FROM \S+ AS {target}$(.*?)(?=^FROM)", dockerfile, re.M | re.S)
    return list(json.loads(re.findall(r"^ENTRYPOINT (.*)$", stage, re.M)[0]))


@pytest.mark.parametrize("service", [name for name in SERVICES if kind(name) in SETTINGS])
def test_every_setting_in_an_environment_is_one_of_the_service(service: str) -> None:
    fields = SETTINGS[kind(service)].model_fields
    for name in SERVICES[service]["environment"]:
        prefix, _, field = name.partition("_")
        assert prefix == "COLLAPIPE" and field.lower() in fields, name


@pytest.mark.parametrize("service", load_services("compose.yaml"))
def test_host_id_host_name_and_address_agree(service: str) -> None:
    described = SERVICES[service]
    if kind(service) in SETTINGS:
        environment = described["environment"]
        assert described["hostname"] == service == environment["COLLAPIPE_HOST_ID"]
        assert environment["COLLAPIPE_ADVERTISE"] == f"{service}:7100"
        assert service.startswith(kind(service).partition("-agent")[0])


def test_only_the_tls_layer_turns_insecure_off_and_it_does_so_everywhere() -> None:
    base, secure = load_services("compose.yaml"), load_services("compose.yaml", "compose.tls.yaml")
    issued = " ".join(secure["certificates"]["command"])
    for name, service in base.items():
        assert service["environment"]["COLLAPIPE_INSECURE"] == "true"
        environment, volumes = secure[name]["environment"], secure[name]["volumes"]
        assert environment["COLLAPIPE_INSECURE"] == "false"
        assert f"./tls/issued/{name}:/etc/collapipe/tls:ro" in volumes
        cluster = service["environment"].get("COLLAPIPE_CLUSTER_INDEX", "0")
        holder = f":{name}@{cluster} ".replace("@0 ", " ")
        assert holder in issued.replace("\n", " ")
        assert not any(volume.startswith("./tls:") for volume in volumes), (
            "this mount would contain every key"
        )


def run_processors(monkeypatch: pytest.MonkeyPatch, cores: str) -> None:
    """Runs the program of this name in the process of the test."""
    program = str(COMPOSE / "processors")
    monkeypatch.setattr(sys, "argv", [program, cores])
    runpy.run_path(program, run_name="__main__")


def test_shares_of_processors_scale_with_the_number_of_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = dict(
        re.findall(r"\$\{(\w+_CPUS):-([\d.]+)\}", (COMPOSE / "compose.yaml").read_text())
    )
    run_processors(monkeypatch, "8")
    printed = capsys.readouterr().out
    scaled = {name: float(cpus) for name, cpus in re.findall(r"export (\w+)=([\d.]+)", printed)}
    assert scaled.keys() == variables.keys()
    total = sum(float(service.get("cpus", 0)) for service in load_services("compose.yaml").values())
    assert total == pytest.approx(1.96)
    for name, cpus in variables.items():
        assert scaled[name] == pytest.approx(float(cpus) * 8 / total, rel=1e-2)


@pytest.mark.parametrize("cores", ["many", "0", "-1"])
def test_invalid_number_of_cores_is_refused(
    cores: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=cores):
        run_processors(monkeypatch, cores)
    assert not capsys.readouterr().out


def test_devices_are_named_after_profiles_and_may_use_less_memory_than_their_limit() -> None:
    units = {"m": 1 << 20, "g": 1 << 30}
    for name in DEVICE_PROFILES:
        if name == "jetson-orin-nano":  # it has its own layer
            continue
        limit = load_layer("compose.yaml")[f"x-{name}"]["mem_limit"]
        settings = load_layer("compose.yaml")[f"x-{name}-settings"]
        process_bytes = int(limit[:-1]) * units[limit[-1]]
        assert int(settings["COLLAPIPE_MEMORY_BYTES"]) < process_bytes - 400e6


def test_layers_in_the_env_file_exist() -> None:
    text = (COMPOSE / ".env").read_text(encoding="utf-8")
    (layers,) = re.findall(r"^COMPOSE_FILE=(.*)$", text, flags=re.MULTILINE)
    assert set(layers.split(":")) <= set(LAYERS)


def test_only_the_layers_with_prometheus_pull_images_of_services() -> None:
    layers = [name for name in ALL_LAYERS if "observability" not in name and "test" not in name]
    assert all("build" in service for service in load_services(*layers).values())


def test_every_built_target_exists_in_the_dockerfile() -> None:
    dockerfile = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^FROM .* AS ([\w-]+)$", dockerfile, flags=re.MULTILINE))
    built = {s["build"]["target"] for s in SERVICES.values() if "build" in s}
    assert built and built <= targets

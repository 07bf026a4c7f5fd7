"""Files of `deploy/`: they parse, fit each other, and name only what exists."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ppengine.common.config import ConfigError
from ppengine.http.api_keys import ApiKeys

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose"


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
    return found


@pytest.mark.parametrize("file", [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml")], ids=lambda file: file.name)
def test_every_yaml_file_parses(file: Path) -> None:
    assert all(isinstance(one, dict) for one in yaml.safe_load_all(file.read_text()))


def test_mounted_files_are_there_and_images_have_a_version() -> None:
    for name, service in services().items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert not source.startswith(".") or (COMPOSE / source).is_file(), mount
        _, _, version = service["image"].partition(":")
        assert version not in ("", "latest"), name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "nothing is open to other hosts"
    build = services()["engine"]["build"]
    assert (COMPOSE / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"


def test_every_secret_is_a_variable_that_must_be_set() -> None:
    for name, variable in (("engine", "PPCONSOLE_API_KEY"), ("grafana", "GF_SECURITY_ADMIN_PASSWORD")):
        assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", services()[name]["environment"][variable])


def test_the_key_of_the_manifest_is_refused_until_it_is_changed(tmp_path: Path) -> None:
    secret = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(secret["stringData"]["keys"])
    with pytest.raises(ConfigError, match="with a key of 16 characters or more"):
        ApiKeys.load(str(file))


def test_prometheus_scrapes_the_engine_and_grafana_asks_prometheus() -> None:
    (job,) = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    ((target,),) = (one["targets"] for one in job["static_configs"])
    name, _, port = target.partition(":")
    assert any(one.endswith(f":{port}") for one in services()[name]["ports"])
    (source,) = yaml.safe_load((COMPOSE / "grafana" / "datasources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    (provider,) = yaml.safe_load((COMPOSE / "grafana" / "dashboards.yaml").read_text())["providers"]
    mounts = dict(mount.split(":")[:2] for mount in services()["grafana"]["volumes"])
    assert Path(mounts["../grafana-engine.json"]).parent == Path(provider["options"]["path"])
    assert services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in mounts.values()


def test_the_image_has_the_sources_and_the_extras_that_exist() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    wanted = set(re.search(r"'\.\[(.+)\]'", text)[1].split(","))  # type: ignore[index]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert {"engine", "serve"} < wanted <= set(project["project"]["optional-dependencies"])
    copied = {word for line in re.findall(r"^COPY (.+) \S+$", text, re.M) for word in line.split()}
    assert all((ROOT / word).exists() for word in copied)
    kept = set(re.findall(r"^!(.+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.M))
    assert kept == copied, "the context has what is copied"
    built = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {path.split("/")[0] for path in [*built["packages"], *built["force-include"]]} <= copied


def test_the_board_has_no_panel_twice_and_none_over_another() -> None:
    panels = json.loads((DEPLOY / "grafana-engine.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or all(target["expr"] for target in panel["targets"])

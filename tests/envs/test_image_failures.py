"""Docker images on a stub of the daemon: one of many processes does the work, and every failure is one clear line."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest

from envs.sandbox.base import DEFAULT_IMAGE
from tests.envs.image_files import (
    PROCESSES,
    folder,
    prepare,
    prepare_in_process,
    prepare_in_processes,
    program,
    reason,
    rootfs,
)
from tests.envs.stub_engine import Answer, StubEngine

NO_SPACE = "Error processing tar file(exit status 1): write /f1: no space left on device"


@pytest.fixture
def server(tmp_path: Path) -> Path:
    path = tmp_path / "server"
    path.write_bytes(program())
    return path


def stub_reason(engine: StubEngine, image: str, server: Path) -> str:
    client = docker.APIClient(engine.url, version="auto")
    try:
        return reason(client, image, server)
    finally:
        client.close()


def test_one_pull_and_one_build_for_all_processes_d21(server: Path) -> None:
    """D21."""
    with StubEngine(slow_s=1.0) as engine:
        ids = prepare_in_processes(engine.url, "somewhere/image:7", server)
        assert len({*ids}) == 1
        assert engine.calls == {"pull": 1, "build": 1}


def test_one_build_for_all_processes(server: Path, tmp_path: Path) -> None:
    task = folder(tmp_path / "task", "FROM x\n")
    with StubEngine(slow_s=1.0) as engine:
        assert len({*prepare_in_processes(engine.url, str(task), server)}) == 1
        assert engine.calls == {"build": 2}  # the folder's, and the one that adds the server


def test_who_waited_for_a_failure_gets_it(server: Path) -> None:
    # Threads, since locks are between them too, and they are sure to begin while the first one waits.
    with (
        StubEngine(*[(404, "pull access denied for x, repository does not exist")] * 99, slow_s=2.0) as engine,
        ThreadPoolExecutor(PROCESSES) as pool,
    ):
        said = list(pool.map(prepare_in_process, [engine.url] * PROCESSES, ["x:1"] * PROCESSES, [server] * PROCESSES))
        assert len({*said}) == 1
        assert "the registry has no image x:1" in said[0]
        assert engine.calls["pull"] == 1
        engine.slow_s = 0.0
        stub_reason(engine, "x:1", server)
        assert engine.calls["pull"] == 2  # who comes later asks again


def test_the_default_image_is_never_pulled(server: Path, tmp_path: Path) -> None:
    with StubEngine() as engine:
        said = "docker: there is no image agentgrad-sandbox:1: run bash scripts/build_sandbox_image.sh"
        assert stub_reason(engine, DEFAULT_IMAGE, server) == said
        task = folder(tmp_path / "task")
        assert stub_reason(engine, str(task), server) == f"{said} ({task}/Dockerfile starts from it)"
        assert not engine.calls


@pytest.mark.parametrize("answer", [(500, NO_SPACE), (200, NO_SPACE)])
@pytest.mark.parametrize("kind", ["pull", "import", "build", "server"])
def test_the_disk_is_full(server: Path, tmp_path: Path, kind: str, answer: Answer) -> None:
    names = {
        "pull": "x:1",
        "import": str(rootfs(tmp_path / "r.tar")),
        "build": str(folder(tmp_path / "t", "FROM x")),
    }
    with StubEngine(answer, images=("y:1",)) as engine:
        said = stub_reason(engine, names.get(kind, "y:1"), server)
    assert said.startswith("docker: no space left on the daemon's disk for ")
    assert said.endswith(f"({NO_SPACE}): free some (docker system prune)")


@pytest.mark.parametrize("begun", ["", '{"stream": '])
@pytest.mark.parametrize("kind", ["pull", "import", "build"])
def test_the_daemon_dies_meanwhile(server: Path, tmp_path: Path, kind: str, begun: str) -> None:
    names = {
        "pull": "x:1",
        "import": str(rootfs(tmp_path / "r.tar")),
        "build": str(folder(tmp_path / "t", "FROM x")),
    }
    with StubEngine((0, begun)) as engine:
        assert "the daemon does not answer" in stub_reason(engine, names[kind], server)


def test_a_from_is_tried_again_when_its_registry_is_busy(server: Path, tmp_path: Path) -> None:
    task = folder(tmp_path / "t", "FROM x\n")
    with StubEngine((200, "toomanyrequests: later"), (500, "received unexpected HTTP status: 502 Bad")) as engine:
        client = docker.APIClient(engine.url, version="auto")
        assert prepare(client, str(task), server).startswith("sha256:id-of-agentgrad-ready:")
        client.close()
        assert engine.calls == {"build": 4}


def test_onbuild_steps_are_not_run(server: Path) -> None:
    with StubEngine(images=("x:1",)) as engine:
        engine.images["x:1"]["Config"] = {"OnBuild": ["COPY . /app"]}
        assert "image x:1 has ONBUILD steps" in stub_reason(engine, "x:1", server)


def test_paths_that_lead_nowhere(server: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "root.tar.zst").write_bytes(b"x")
    with StubEngine() as engine:
        said = stub_reason(engine, f"{tmp_path}/none", server)
        assert said == f"docker: image {tmp_path}/none: there is no such file or folder: check the path"
        assert "holds no Dockerfile" in stub_reason(engine, f"{tmp_path}/empty", server)
        assert "archives are read: repack it" in stub_reason(engine, f"{tmp_path}/root.tar.zst", server)
        server.write_text("#!/bin/sh\n")
        assert "is no Linux program" in stub_reason(engine, "x:1", server)
        server.unlink()
        assert f"{server}: No such file or directory" in stub_reason(engine, "x:1", server)
        assert not engine.calls

"""Docker images, on the real daemon where there is one: what is prepared starts, once, and failures say why."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import DockerException, ImageNotFound

from envs.sandbox.base import DEFAULT_IMAGE
from tests.envs.image_files import EXIT_CODE, folder, prepare, prepare_in_processes, program, reason, rootfs
from tests.envs.stub_registry import StubRegistry

pytestmark = pytest.mark.docker


@pytest.fixture
def server(tmp_path: Path) -> Path:
    path = tmp_path / "server"
    path.write_bytes(program())
    return path


@pytest.fixture
def api(server: Path) -> Iterator[Any]:
    """The real daemon's client; afterwards every image that was made with this test's own server is gone."""
    try:
        client = docker.from_env().api
        client.ping()
    except (DockerException, OSError) as error:
        missing = f"no Docker daemon answers: {error}"
        if "docker" in os.environ.get("AGENTGRAD_REQUIRE", ""):
            pytest.fail(f"AGENTGRAD_REQUIRE names docker, but: {missing}")
        pytest.skip(f"needs docker: {missing}")
    try:
        if client.version()["Arch"] != "amd64":
            pytest.skip("the tests' program is for amd64")
        yield client
    finally:
        label = f"agentgrad.server={hashlib.sha256(server.read_bytes()).hexdigest()}"
        for image in client.images(filters={"label": label}):
            remove_with_parents(client, image["Id"])
        client.close()


def remove_with_parents(client: Any, image: str) -> None:
    """Remove an image and what it was built from, down to the image that all sandboxes start from."""
    names: list[str] = []
    while image:
        inspected = client.inspect_image(image)
        if DEFAULT_IMAGE in inspected["RepoTags"]:
            break
        names += [*inspected["RepoTags"], *inspected["RepoDigests"], image]
        image = inspected["Parent"]
    for name in names:
        with suppress(ImageNotFound):  # it may have gone with an earlier one
            client.remove_image(name)


def started(api: Any, image: str) -> int:
    """The exit code of the server in the image, started as nobody, with a read-only root."""
    how = api.create_host_config(network_mode="none", read_only=True, cap_drop=["ALL"])
    made = api.create_container(image, ["/.agentgrad/server"], user="65534:65534", host_config=how)
    try:
        api.start(made["Id"])
        return api.wait(made["Id"])["StatusCode"]
    finally:
        api.remove_container(made["Id"], force=True)


def files(api: Any, image: str) -> dict[str, tarfile.TarInfo]:
    made = api.create_container(image, ["/none"])
    try:
        content = io.BytesIO(b"".join(api.export(made["Id"])))
    finally:
        api.remove_container(made["Id"], force=True)
    with tarfile.open(fileobj=content) as archive:
        return {entry.name: entry for entry in archive}


def test_a_named_image_is_made_ready_once(api: Any, server: Path) -> None:
    image = prepare(api, DEFAULT_IMAGE, server)
    assert image.startswith("sha256:")
    made = api.inspect_image(image)
    assert made["Config"]["Labels"]["agentgrad.server"] == hashlib.sha256(server.read_bytes()).hexdigest()
    assert [tag.split(":")[0] for tag in made["RepoTags"]] == ["agentgrad-ready"]
    assert started(api, image) == EXIT_CODE
    entry = files(api, image)[".agentgrad/server"]
    assert (entry.mode & 0o7777, entry.uid, entry.gid, entry.size) == (0o755, 0, 0, server.stat().st_size)
    assert prepare(api, DEFAULT_IMAGE, server) == image
    server_of_before = server.read_bytes()
    server.write_bytes(program())
    other = prepare(api, DEFAULT_IMAGE, server)
    remove_with_parents(api, other)
    server.write_bytes(server_of_before)
    assert other != image


def test_the_image_s_own_settings_stay_and_need_no_rights(api: Any, server: Path, tmp_path: Path) -> None:
    text = f"FROM {DEFAULT_IMAGE}\nCOPY mark /mark\nUSER 1234\nWORKDIR /opt/app\nENV A=b\n"
    image = prepare(api, str(folder(tmp_path / "task", text)), server)
    config = api.inspect_image(image)["Config"]
    assert (config["User"], config["WorkingDir"], "A=b" in config["Env"]) == ("1234", "/opt/app", True)
    assert files(api, image)[".agentgrad/server"].uid == 0
    assert started(api, image) == EXIT_CODE


def test_a_folder_is_built_once_for_its_content(api: Any, server: Path, tmp_path: Path) -> None:
    task = folder(tmp_path / "task")
    first = prepare(api, str(task), server)
    os.utime(task / "mark", (1, 1))
    assert prepare(api, str(task), server) == first
    assert prepare(api, str(task / "Dockerfile"), server) == first
    (task / "mark").chmod(0o755)
    second = prepare(api, str(task), server)
    assert second != first
    assert files(api, second)["task/mark"].mode & 0o777 == 0o755
    assert started(api, second) == EXIT_CODE


def test_dockerignore_and_names_are_honoured(api: Any, server: Path, tmp_path: Path) -> None:
    task = folder(tmp_path / "task", f"FROM {DEFAULT_IMAGE}\nCOPY . /task/\n")
    (task / "Dockerfile").rename(tmp_path / "elsewhere")
    (task / "Other file").symlink_to(tmp_path / "elsewhere")
    (task / "secret").mkdir()
    for name in ("secret/key", "secret/public", "a.log"):
        (task / name).write_text(uuid.uuid4().hex)
    (task / "link").symlink_to("/mark")
    (task / ".dockerignore").write_text("# what stays here\n\n*.log\nsecret\n!secret/public\n")
    image = prepare(api, str(task / "Other file"), server)
    found = {name for name, entry in files(api, image).items() if name.startswith("task/") and not entry.isdir()}
    names = ("mark", "link", "secret/public", "Other file", ".dockerignore")
    assert found == {f"task/{name}" for name in names}


def test_a_step_that_fails_shows_the_end_of_the_log(api: Any, server: Path, tmp_path: Path) -> None:
    text = f"FROM {DEFAULT_IMAGE}\nRUN echo toomanyrequests {uuid.uuid4()}; echo the reason >&2; exit 7\n"
    said = reason(api, str(folder(tmp_path / "task", text)), server)
    assert said.startswith(f"docker: the build of {tmp_path}/task/Dockerfile failed: The command '/bin/sh -c echo")
    assert "returned a non-zero code: 7; its log ends: " in said
    assert "| the reason" in said
    assert said.endswith(f"docker build -f {tmp_path}/task/Dockerfile {tmp_path}/task shows all of it")


def test_a_dockerfile_with_a_mistake(api: Any, server: Path, tmp_path: Path) -> None:
    assert "unknown instruction: FRM" in reason(api, str(folder(tmp_path / "task", "FRM x\n")), server)


@pytest.mark.parametrize(("suffix", "mode"), [(".tar", "w"), (".tar.gz", "w:gz"), (".tar.xz", "w:xz")])
def test_an_archive_without_a_shell(api: Any, server: Path, tmp_path: Path, suffix: str, mode: str) -> None:
    archive = rootfs(tmp_path / f"root{suffix}", mode)
    image = prepare(api, str(archive), server)
    assert started(api, image) == EXIT_CODE
    assert files(api, image)["etc/mark"].size == 5000
    assert prepare(api, str(archive), server) == image


@pytest.mark.parametrize(("suffix", "mode"), [(".tar", "w"), (".tgz", "w:gz"), (".tar.bz2", "w:bz2")])
def test_a_damaged_archive(api: Any, server: Path, tmp_path: Path, suffix: str, mode: str) -> None:
    archive = rootfs(tmp_path / f"root{suffix}", mode)
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    said = reason(api, str(archive), server)
    assert "no whole tar archive" in said or "has no end" in said
    assert said.endswith("make it again")


def test_an_image_for_another_processor(api: Any, server: Path) -> None:
    right = server.read_bytes()
    server.write_bytes(program(machine=183))
    said = reason(api, DEFAULT_IMAGE, server)
    server.write_bytes(right)
    assert said.startswith(f"docker: image {DEFAULT_IMAGE} is for linux/amd64, and the sandbox's server")
    assert said.endswith("for linux/arm64: use an image for linux/arm64")


def test_an_image_is_pulled_once_and_then_no_registry_is_asked_d21(api: Any, server: Path) -> None:
    """D21."""
    with StubRegistry(429, 503) as registry:
        ids = prepare_in_processes(None, registry.image, server)
        assert len({*ids}) == 1
        assert registry.pulls == 3
    assert prepare(api, registry.image, server) == ids[0]
    assert prepare(api, f"{registry.repository}@{registry.digest}", server) == ids[0]
    assert started(api, ids[0]) == EXIT_CODE


def test_an_image_is_pulled_by_its_digest(api: Any, server: Path) -> None:
    with StubRegistry() as registry:
        image = prepare(api, f"{registry.image}@{registry.digest}", server)
    assert started(api, image) == EXIT_CODE


@pytest.mark.parametrize(
    ("status", "pulls", "text"),
    [
        (429, 3, "docker: the registry allows no more pulls of {image} for now, 3 tries (toomanyrequests: as the"),
        (503, 3, "docker: the registry failed for {image}, 3 tries (received unexpected HTTP status: 503"),
        (404, 1, "docker: the registry has no image {image}, or does not show it without a login (manifest for"),
        (403, 1, "docker: the registry has no image {image}, or does not show it without a login (pull access den"),
        (401, 1, "docker: the registry refuses {image} (unauthorized: as the test wants it): run docker login"),
    ],
)
def test_a_registry_that_refuses_d21(api: Any, server: Path, status: int, pulls: int, text: str) -> None:
    with StubRegistry(status, for_ever=True) as registry:
        assert reason(api, registry.image, server).startswith(text.format(image=registry.image))
        assert registry.pulls == pulls


def test_no_network_d16(api: Any, server: Path) -> None:
    """D16: the image is missing, and its registry cannot be reached."""
    with StubRegistry() as registry:
        pass
    said = reason(api, registry.image, server)
    assert said.startswith(f"docker: there is no image {registry.image} here, and its registry cannot be reached (")
    assert said.endswith("connection refused): check the network, or load the image (docker load)")


@pytest.mark.parametrize("name", ["Upper", "a b", "x@sha256:12", "~/image", ""])
def test_what_is_no_name(api: Any, server: Path, name: str) -> None:
    said = reason(api, name, server)
    assert said.startswith(f"docker: {name!r} is no name of an image")


def test_an_id_is_not_pulled(api: Any, server: Path) -> None:
    assert "ids cannot be pulled: give a name" in reason(api, f"sha256:{'1' * 64}", server)
    assert prepare(api, api.inspect_image(DEFAULT_IMAGE)["Id"], server) == prepare(api, DEFAULT_IMAGE, server)

"""Task folders as files: what is read, what is refused in one line, and when a Dockerfile needs a build."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.dockerfile import last_workdir, read_dockerfile
from envs.sandbox.base import MIB, SandboxFile, SandboxLimits
from envs.task_file import IMAGE_LIMITS, TaskFolder, read_task_folder
from envs.task_toml import read_task_toml
from tests.envs.task_folders import FILES, SEPARATE, write_task

ALL_KEYS = """
version = "1.0"
source = "https://example.org/tasks"
artifacts = ["answer.txt", {source = "/app/out", destination = "out", exclude = []}]
[task]
name = "our/one"
version = "2"
description = "One."
authors = [{name = "A", email = "a@example.org"}]
keywords = ["shell"]
[metadata]
anything = {goes = 2020-01-01}
[agent]
timeout_sec = 30
user = "root"
network_mode = "allowlist"
allowed_hosts = ["example.org"]
[verifier]
timeout_sec = 40
user = "nobody"
network_mode = "no-network"
environment_mode = "separate"
collect = []
env = {SEED = "3"}
[environment]
build_timeout_sec = 100
os = "Linux"
cpus = 2
memory = "1G"
storage_mb = 300
gpus = 0
mcp_servers = []
env = {LEVEL = "high"}
workdir = "/srv/app"
network_mode = "public"
[solution]
env = {TOKEN = "t"}
"""


def read(folder: Path, **changes: str | bytes | None) -> TaskFolder:
    return read_task_folder(write_task(folder, {name.replace("__", "/"): text for name, text in changes.items()}))


def refusal(folder: Path, changes: dict[str, str | bytes | None]) -> str:
    """The one line that says why a task is refused."""
    task = write_task(folder, changes)
    with pytest.raises(ValueError, match=r".") as error:
        read_task_folder(task)
    line = str(error.value)
    assert "\n" not in line
    assert str(task) in line, "it names the place"
    return line.replace(str(task), "TASK")


# What is read.


def test_a_small_task_has_every_default(tmp_path: Path) -> None:
    task = read_task_folder(write_task(tmp_path))
    assert (task.name, task.instruction) == ("one", "Write the word to answer.txt.")
    assert task.relaxed == ()
    assert task.grader_mode == "separate"
    assert task.sandbox.files == {"/app/word.txt": SandboxFile(content=b"harbour\n")}
    assert (task.sandbox.image, task.sandbox.workdir, task.sandbox.user) == (None, "/app", "nobody")
    assert task.sandbox.limits == SandboxLimits()
    assert task.artifacts == ("/logs/artifacts", "/app/answer.txt")
    assert set(task.tests) == {"/tests/test.sh", "/tests/expected.txt"}
    assert set(task.solution) == {"solve.sh"}


def test_every_key_that_is_read_does_something(tmp_path: Path) -> None:
    task = read_task_folder(write_task(tmp_path, {"task.toml": ALL_KEYS}))
    toml, agent, grader = task.toml, task.sandbox, task.grader
    assert (toml.schema_version, toml.agent.timeout_sec, toml.verifier.timeout_sec) == ("1.0", 30, 40)
    assert (toml.verifier.env, toml.solution.env) == ({"SEED": "3"}, {"TOKEN": "t"})
    assert (agent.user, grader.user) == ("root", "nobody")
    assert (agent.network, agent.allowed_hosts, grader.network) == ("allowlist", ("example.org",), "none")
    for spec in (agent, grader):
        assert (spec.workdir, spec.env) == ("/srv/app", {"LEVEL": "high"})
        assert spec.limits.memory_bytes == 1024 * MIB
        assert spec.limits.disk_bytes == spec.limits.max_file_bytes == 300 * MIB
        assert spec.limits.cpus == 2
    assert task.artifacts == ("/logs/artifacts", "/srv/app/answer.txt", "/app/out")
    assert task.relaxed == ("user root", "network to example.org")


def test_the_tests_folders_are_in_the_agents_sandbox_only_when_it_is_shared(tmp_path: Path) -> None:
    separate = read_task_folder(write_task(tmp_path, name="a"))
    assert separate.sandbox.folders == ("/logs/artifacts",)
    assert separate.grader.folders == ("/logs/artifacts", "/logs/verifier", "/tests")
    shared = read_task_folder(write_task(tmp_path, {"task.toml": ""}, name="b"))
    assert shared.grader_mode == "shared"
    assert shared.sandbox == shared.grader
    assert shared.sandbox.folders == separate.grader.folders


@pytest.mark.parametrize(
    ("toml", "mode"),
    [
        ("", "shared"),
        ('artifacts = ["a"]', "separate"),
        ('artifacts = ["a"]\n[verifier]\nenvironment_mode = "shared"', "shared"),
        ('[verifier]\nenvironment_mode = "separate"', "separate"),
    ],
)
def test_what_is_not_said_follows_from_the_artifacts(tmp_path: Path, toml: str, mode: str) -> None:
    assert read_task_folder(write_task(tmp_path, {"task.toml": toml})).grader_mode == mode


def test_an_image_is_run_as_it_is_and_that_is_on_record(tmp_path: Path) -> None:
    toml = '[environment]\ndocker_image = "registry.example/task:3"\nworkdir = "/opt/app"\n'
    task = read_task_folder(write_task(tmp_path, {"task.toml": toml, "environment/Dockerfile": None}))
    assert (task.sandbox.image, task.sandbox.workdir) == ("registry.example/task:3", "/opt/app")
    assert task.sandbox.limits == IMAGE_LIMITS
    assert task.relaxed == ("user root", "writable root file system")
    toml += '[agent]\nuser = "nobody"\n'
    task = read_task_folder(write_task(tmp_path, {"task.toml": toml, "environment/Dockerfile": None}))
    assert task.relaxed == ("writable root file system",)


def test_a_dockerfile_that_needs_a_build_is_the_image(tmp_path: Path) -> None:
    path = write_task(tmp_path, {"environment/Dockerfile": "FROM debian:12\nRUN true\nWORKDIR /srv\nWORKDIR app\n"})
    task = read_task_folder(path)
    assert task.sandbox.image == str(path / "environment")
    assert task.sandbox.workdir == "/srv/app"
    assert task.sandbox.files == {}
    assert task.relaxed == ("user root", "writable root file system")


def test_files_outside_the_working_folder_get_folders_of_their_own(tmp_path: Path) -> None:
    dockerfile = "FROM agentgrad-sandbox:1\nCOPY a /data/in/\nCOPY b /data/in/deep/\nCOPY c /opt/tool/c\n"
    changes = {"environment/Dockerfile": dockerfile, **{f"environment/{name}": name for name in "abc"}}
    task = read_task_folder(write_task(tmp_path, changes))
    assert set(task.sandbox.files) == {"/data/in/a", "/data/in/deep/b", "/opt/tool/c"}
    assert task.sandbox.folders == ("/data/in", "/opt/tool", "/logs/artifacts")


# What is refused.


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("what = 1", "TASK/task.toml: what: unknown key"),
        ("[verifier]\nretries = 1", "TASK/task.toml: verifier.retries: unknown key"),
        ('schema_version = "2.0"', "TASK/task.toml: schema_version: "),
        ("a = ", "TASK/task.toml: no TOML: "),
        ("[[steps]]\nname = 'a'", "TASK/task.toml: steps: not supported: "),
        ("multi_step_reward_strategy = 'mean'", "TASK/task.toml: multi_step_reward_strategy: not supported: "),
        ("[[environment.mcp_servers]]\nname = 'a'", "environment.mcp_servers: not supported: "),
        ("[environment]\ngpus = 1", "environment.gpus: not supported: "),
        ("[environment]\nos = 'windows'", "environment.os: not supported: "),
        ("[environment.healthcheck]\ncommand = 'a'", "environment.healthcheck: not supported: "),
        ("[environment]\nskills_dir = '/s'", "environment.skills_dir: not supported: "),
        ("[environment]\ntpu = {type = 'v6e', topology = '2x2'}", "environment.tpu: not supported: "),
        ("[[verifier.collect]]\ncommand = 'a'", "verifier.collect: not supported: "),
        ("[verifier.environment]\ndocker_image = 'a'", "verifier.environment: not supported: "),
        ("artifacts = [{source = 'a', service = 'db'}]", "artifacts.0.service: not supported: "),
        ("artifacts = [{source = 'a', exclude = ['b']}]", "artifacts.0.exclude: not supported: "),
        ("artifacts = ['../a']", "artifacts: '../a' is no path"),
        ("artifacts = ['/']", "artifacts: '/' is no path"),
        ("artifacts = ['']", "artifacts: '' is no path"),
        ("artifacts = ['/tests/a']", "artifacts: '/tests/a' is where the tests and their reward are"),
        ("artifacts = ['/logs']", "artifacts: '/logs' is where the tests and their reward are"),
        ("artifacts = ['/etc/passwd']", "artifacts: '/etc/passwd' cannot be written here"),
        ("artifacts = [3]", "TASK/task.toml: artifacts.0: "),
        ("[agent]\nuser = 'alice'", "agent.user: 'alice' is not known in sandboxes"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec: "),
        ("[agent]\ntimeout_sec = inf", "agent.timeout_sec: "),
        ("[agent]\nallowed_hosts = ['a.org']", "agent.allowed_hosts: set network_mode"),
        ("[environment]\nallowed_hosts = ['a.org']", "allowed_hosts go with network_mode"),
        ("[environment]\nnetwork_mode = 'allowlist'", "allowed_hosts go with network_mode"),
        ("[environment]\nnetwork_mode = 'some'", "environment.network_mode: "),
        ("[environment]\nmemory = 'much'", "environment.memory: 'much' is no size"),
        ("[environment]\nworkdir = 'app'", "sandbox folder 'app' must be a plain absolute path"),
        ("[environment]\nworkdir = '/usr/app'", "environment.workdir: /usr/app is the system's own folder"),
        ("[environment]\ndocker_image = 'a'", "environment.workdir: the image's working folder is not known"),
        ("[environment]\nenv = {A = '${HOME}'}", "environment.env.A: templates are not filled in"),
        ("[verifier]\nenv = {A = '${HOME:-x}'}", "verifier.env.A: templates are not filled in"),
        ("[solution]\nenv = {'A=B' = 'x'}", "solution.env: 'A=B' is no name"),
        ("[agent]\nuser = 'root'\n[verifier]\nuser = 'nobody'", "user and network must be the agent's"),
        ("[verifier]\nnetwork_mode = 'public'", "user and network must be the agent's"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path, toml: str, says: str) -> None:
    changes: dict[str, str | bytes | None] = {"task.toml": toml}
    if "docker_image = 'a'" in toml:
        changes["environment/Dockerfile"] = None
    assert says in refusal(tmp_path, changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task.toml": None}, "TASK: there is no task.toml"),
        ({"instruction.md": None}, "TASK: there is no instruction.md"),
        ({"instruction.md": " \n"}, "TASK/instruction.md: empty"),
        ({"instruction.md": b"\xff"}, "TASK/instruction.md: not UTF-8"),
        ({"tests/test.sh": None, "tests/test.bat": ""}, "TASK: there is no tests/test.sh"),
        ({"tests/test.sh": None, "tests/expected.txt": None}, "TASK: there is no tests/"),
        ({"environment/Dockerfile": None}, "TASK: there is no environment/Dockerfile"),
        ({"environment/docker-compose.yaml": ""}, "docker-compose.yaml: not supported: "),
        ({"tests/Dockerfile": "FROM a"}, "tests/Dockerfile: not supported: "),
        ({"trajectory.json": "{}"}, "trajectory.json: not supported: "),
        ({"steps/a/instruction.md": ""}, "steps: not supported: "),
        ({"environment/Dockerfile": "# nothing\n"}, "Dockerfile: the first line must be FROM"),
        ({"environment/Dockerfile": "FROM a\nCOPY none .\n"}, "COPY none: there is no such file"),
        ({"environment/Dockerfile": "FROM a\nCOPY ../task.toml .\n"}, "COPY ../task.toml: there is no such file"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR /a/b\nCOPY word.txt /a/w\n"}, "COPY into /a, which holds"),
    ],
)
def test_a_broken_folder_is_one_line(tmp_path: Path, changes: dict[str, str | bytes | None], says: str) -> None:
    assert says in refusal(tmp_path, changes)


def test_links_and_special_files_are_refused(tmp_path: Path) -> None:
    """They could lead out of the task's folder, on the machine of whoever trains."""
    task = write_task(tmp_path)
    (task / "tests" / "link").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match=r"tests/link: a task folder holds plain files"):
        read_task_folder(task)
    (task / "tests" / "link").unlink()
    (task / "tests" / "folder").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=r"tests/folder: a task folder holds plain files"):
        read_task_folder(task)
    (task / "tests" / "folder").unlink()
    os.mkfifo(task / "solution" / "pipe")
    with pytest.raises(ValueError, match=r"solution/pipe: a task folder holds plain files"):
        read_task_folder(task)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    text=st.text(max_size=80)
    | st.sampled_from([SEPARATE, ALL_KEYS]).flatmap(lambda whole: st.integers(0, len(whole)).map(lambda at: whole[:at]))
)
def test_any_text_is_read_or_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "task.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    said = None
    try:
        read_task_toml(path)
    except ValueError as error:
        said = str(error)
    assert said is None or said.startswith(f"{path}: ")


# Dockerfiles.


def docker_file(folder: Path, text: str) -> Path:
    environment = folder / "environment"
    (environment / "sub").mkdir(parents=True, exist_ok=True)
    (environment / "a.txt").write_text("a")
    (environment / "b.sh").write_text("b")
    (environment / "b.sh").chmod(0o755)
    (environment / "sub" / "c.txt").write_text("c")
    (environment / "Dockerfile").write_text(text)
    return environment / "Dockerfile"


@pytest.mark.parametrize(
    ("lines", "paths"),
    [
        ("COPY a.txt .", {"/app/a.txt"}),
        ("COPY a.txt b.txt", {"/app/b.txt"}),
        ("COPY a.txt b.sh in/", {"/app/in/a.txt", "/app/in/b.sh"}),
        ("COPY sub .", {"/app/c.txt"}),
        ("COPY sub sub", {"/app/sub/c.txt"}),
        ("COPY sub/ /app/d/", {"/app/d/c.txt"}),
        ("COPY /a.txt ./", {"/app/a.txt"}),
        ('COPY ["a.txt", "with space.txt"]', {"/app/with space.txt"}),
        ("WORKDIR /srv\nCOPY a.txt .", {"/srv/a.txt"}),
        ("COPY a.txt x/y\nCOPY b.sh x", {"/app/x/y", "/app/x/b.sh"}),
        ("COPY a.txt /tmp/a.txt", {"/tmp/a.txt"}),
        ("COPY . .", {"/app/a.txt", "/app/b.sh", "/app/sub/c.txt", "/app/Dockerfile"}),
        ("copy \\\n  # why\n a.txt \\\n .", {"/app/a.txt"}),
    ],
)
def test_copies_go_where_docker_puts_them(tmp_path: Path, lines: str, paths: set[str]) -> None:
    found = read_dockerfile(docker_file(tmp_path, f"# syntax\nFROM agentgrad-sandbox:1\n{lines}\n"))
    assert found is not None
    assert set(found.files) == paths
    for name, file in found.files.items():
        assert file.mode == (0o755 if name.endswith("b.sh") else 0o644)


def test_variables_user_and_folder(tmp_path: Path) -> None:
    text = 'FROM debian:12\nENV A=1 B="two words"\nENV C three four\nUSER nobody\nWORKDIR /srv\nWORKDIR app\n'
    found = read_dockerfile(docker_file(tmp_path, text))
    assert found is not None
    assert found.env == {"A": "1", "B": "two words", "C": "three four"}
    assert (found.image, found.user, found.workdir) == ("debian:12", "nobody", "/srv/app")


@pytest.mark.parametrize(
    "text",
    [
        "FROM a\nRUN true",
        "FROM a\nADD https://example.org/x .",
        "FROM a AS b\n",
        "FROM a\nFROM b",
        "FROM --platform=linux/amd64 a",
        "FROM scratch",
        "ARG V=1\nFROM a:$V",
        "FROM a\nCOPY --from=b /x /y",
        "FROM a\nCOPY --chmod=700 a.txt .",
        "FROM a\nCOPY *.txt .",
        "FROM a\nENV A=$B",
        "FROM a\nWORKDIR $HOME",
        "FROM a\nWORKDIR /usr/local",
        "FROM a\nWORKDIR /",
        "FROM a\nCOPY a.txt /etc/a.txt",
        "FROM a\nCOPY a.txt /a.txt",
        "FROM a\nCOPY <<EOF /app/x\nhello\nEOF",
        "FROM a\nUSER alice",
        "FROM a\nCMD sleep 1",
        "FROM a\nENTRYPOINT [\"x\"]",
        "FROM a\nVOLUME /data",
    ],
)  # fmt: skip
def test_everything_else_needs_a_build(tmp_path: Path, text: str) -> None:
    assert read_dockerfile(docker_file(tmp_path, text)) is None


def test_a_dockerignore_needs_a_build(tmp_path: Path) -> None:
    path = docker_file(tmp_path, "FROM a\nCOPY . .\n")
    (path.parent / ".dockerignore").write_text("sub\n")
    assert read_dockerfile(path) is None


@pytest.mark.parametrize(
    ("text", "workdir"),
    [
        ("FROM a\nRUN x\nWORKDIR /opt/app", "/opt/app"),
        ("FROM a\nWORKDIR /app\nFROM b\nRUN x", None),
        ("FROM a\nWORKDIR /opt/app\nWORKDIR sub", "/opt/app/sub"),
        ("FROM a\nWORKDIR $X", None),
    ],
)
def test_the_working_folder_of_an_image_that_is_built(tmp_path: Path, text: str, workdir: str | None) -> None:
    assert last_workdir(docker_file(tmp_path, text)) == workdir


def test_the_shipped_tasks_run_with_all_defaults() -> None:
    """So they run everywhere, and no registry is needed."""
    folder = Path("envs/tasks")
    tasks = [read_task_folder(path) for path in sorted(folder.iterdir())]
    assert len(tasks) == 5
    for task in tasks:
        assert task.relaxed == ()
        assert task.sandbox.image is None
        assert task.toml.task.name == f"agentgrad/{task.name}"
    assert {task.grader_mode for task in tasks} == {"shared", "separate"}


def test_the_hidden_part_is_not_shown_by_accident(tmp_path: Path) -> None:
    task = read_task_folder(write_task(tmp_path))
    assert FILES["solution/solve.sh"].strip() not in repr(task)
    assert "sentinel" not in repr(task)

"""The tutorials run as written, one after the other in one folder, as their readers would go through them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.reference_fixtures import CHECKOUT
from tests.test_readme import MAX_WAIT_S, free_ports, needs_tools

ACTIVATED = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
"""The environment of a shell that has activated the one of this Python."""
TUTORIALS = CHECKOUT / "docs" / "tutorials"
ORDER = ("first_picture", "folder_of_pictures", "cookbook", "deploy", "watch")
PORTS = ("50051", "8000", "50052", "8443", "9464", "9090")
# Blocks that are not run here, by a text in them, and why.
NOT_RUN = (
    {} if shutil.which("prometheus") and shutil.which("promtool") else {"prometheus --config": "is not installed"}
)
IN_A_BROWSER = "web_page"
"""`make test-page` runs it."""
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(tutorial: str) -> list[tuple[str, str]]:
    """The language and the text of each block."""
    return _BLOCK.findall((TUTORIALS / f"{tutorial}.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder of a reader who has done all tutorials, and what each block has printed, by its text.

    Only the ports are others.
    """
    folder = tmp_path_factory.mktemp("reader")
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    written = [block for tutorial in ORDER for block in blocks(tutorial)]
    run = [block for block in written if not any(part in block[1] for part in NOT_RUN)]
    # Nobody else calls, so the servers need not wait for balancers when they stop.
    script = ["trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT", "export KESTREL_GRPC_WITHDRAWAL_DELAY=0"]
    script.append(f"export KESTREL_GRPC_PORT={ports['50051']} KESTREL_GRPC_ADDRESS=localhost:{ports['50051']}")
    for number, (kind, text) in enumerate(run):
        for port, used in ports.items():
            text = re.sub(rf"\b{port}\b", str(used), text)
        script.append(rf"printf '\n>>> {number}\n'")
        script.append(text if kind == "sh" else f"python - <<'PYTHON'\n{text}PYTHON")
        script.append("unset KESTREL_GRPC_PORT")  # it is for the first server alone
    with subprocess.Popen(
        ("bash", "-euc", "\n".join(script)),
        cwd=folder,
        env=ACTIVATED,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            output, log = shell.communicate(timeout=MAX_WAIT_S)
        finally:
            with suppress(ProcessLookupError):  # everything has ended
                os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, output + log
    _, *printed = re.split(r"^>>> \d+$", output, flags=re.MULTILINE)
    return folder, {text: shown for (_, text), shown in zip(run, printed, strict=True)}


def shown(printed: dict[str, str], part: str) -> str:
    """What the block that has this text printed."""
    (found,) = (output for text, output in printed.items() if part in text)
    return found


def test_every_tutorial_is_run():
    pages = {page.stem for page in TUTORIALS.glob("*.md")} - {"README"}
    assert pages == {*ORDER, IN_A_BROWSER}


@needs_tools
def test_a_first_picture(reader):
    folder, printed = reader
    color, star, *boxes = shown(printed, "--draw found.png").split("\n")[1:-1]
    assert (color, star) == ("red", "no")
    assert len([line for line in boxes if line.count(" ") == 3]) == 2
    assert shown(printed, "picture.crop").split() == ["blue"]
    assert (folder / "found.png").exists()
    assert len(list(folder.glob("shape-*.png"))) == 2


@needs_tools
def test_a_folder_of_pictures(reader):
    folder, printed = reader
    assert shown(printed, "cat captions.jsonl").count('"caption"') == 6
    assert sorted(path.name for path in (folder / "sorted" / "red").iterdir()) == ["0.png", "2.png", "4.png"]
    assert sorted(path.name for path in (folder / "sorted" / "blue").iterdir()) == ["1.png", "3.png", "5.png"]


@needs_tools
def test_the_recipes_of_the_cookbook(reader):
    folder, printed = reader
    assert shown(printed, "to be checked").split(" ")[0].strip() == "OPEN"
    assert shown(printed, 'red circle").points').split() == ["3", "3"]
    assert shown(printed, "RULES").strip().split("\n") == ["Is there a red circle? yes", "Is there a star? no"]
    square, triangle, click = shown(printed, "upload_image").strip().split("\n")
    assert (square, triangle) == ("blue", "Yes")
    x, y = (int(number) for number in re.findall(r"\d+", click))
    assert 60 <= x <= 170
    assert 190 <= y <= 300
    assert shown(printed, "later.png").strip().split("\n") == [
        "a star second",
        "a blue square first",
        "a green triangle both",
        "a heart neither",
    ]
    assert shown(printed, "num_circles").strip() == "3"
    assert json.loads(shown(printed, "FIELDS")) == {"square": "blue", "triangle": "green"}
    assert shown(printed, "circles.json").strip() == "6 pictures, 6 boxes"
    data = json.loads((folder / "circles.json").read_text(encoding="utf-8"))
    assert {item["image_id"] for item in data["annotations"]} == set(range(1, 7))
    assert shown(printed, "clip.gif").strip().split("\n") == ["frame 0: red", "frame 6: blue", "2 frames asked"]


@needs_tools
def test_a_deployment_with_tls_and_tokens(reader):
    _, printed = reader
    calls = shown(printed, "export KESTREL_GRPC_ADDRESS")
    assert "\nred\n" in calls
    assert '"object":"list"' in calls.replace(" ", "")
    assert shown(printed, "refusal.json").strip() == "401"
    assert "running" in shown(printed, "operator.token) kestrel-grpc load")
    assert "moondream-nano" in shown(printed, "next.toml")


@needs_tools
def test_a_watched_server(reader):
    _, printed = reader
    metrics = shown(printed, "rpc_server_call_duration")
    assert "kestrel_engine_ready 1.0" in metrics
    assert re.search(r'duration_seconds_count\{.*Caption.*"OK"\} 1\.0', metrics)
    for text, output in printed.items():
        if "prometheus --config" in text:
            assert 'job="kestrel"' in output


def test_the_panels_variables_and_alerts_that_are_named_exist():
    text = (TUTORIALS / "watch.md").read_text(encoding="utf-8")
    dashboard = json.loads((CHECKOUT / "deploy" / "grafana" / "dashboard.json").read_text(encoding="utf-8"))
    rules = yaml.safe_load((CHECKOUT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8"))
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    named = re.findall(r"^\| (.+?) \| .+ \|$", text.partition("| Panel |")[2], re.MULTILINE)
    assert len(named) > 5
    assert set(named) <= {panel["title"] for panel in dashboard["panels"] if panel["type"] != "row"}
    (variables,) = re.findall(r"Above the panels, (.*?) select", text)
    assert re.findall(r"\*(.+?)\*", variables) == [item["label"] for item in dashboard["templating"]["list"]]
    told = set(re.findall(r"`(Kestrel\w+)`", text))
    assert told
    assert told <= alerts

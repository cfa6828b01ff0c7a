"""lm-evaluation-harness with a task of our own: questions about a picture, answered over gRPC."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import lm_eval  # installed in an environment of its own
from lm_eval.api.instance import Instance  # the same
from lm_eval.api.registry import get_model  # the same
from PIL import Image

import kestrel_client.lm_eval_model  # noqa: F401 registers the model

QUESTIONS = [
    {"question": "What color is the star?", "answer": "yellow"},
    {"question": "Is there a star?", "answer": "no"},  # wrong, so that the score is a half
]


def main() -> None:
    facts = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "test.jsonl"
        lines.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        results = lm_eval.simple_evaluate(
            model="kestrel-grpc",
            model_args=f"address={facts['open']}",
            batch_size=2,
            tasks=[task(lines, Path(facts["picture"]))],
            bootstrap_iters=0,
        )
    assert results is not None
    answers = [sample["resps"][0][0] for sample in results["samples"]["shapes"]]
    assert answers[0] == "yellow", answers
    assert answers[1].lower().startswith("yes"), answers
    assert results["results"]["shapes"]["exact_match,none"] == 0.5, results["results"]
    print("a task of two questions about a picture: exact match 0.5, as expected")
    command(facts["open"])
    refusals(facts["open"], Image.open(facts["picture"]))


def task(lines: Path, picture: Path) -> dict[str, Any]:
    return {
        "task": "shapes",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(lines)}, "cache_dir": str(lines.parent)},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_image": lambda document: [Image.open(picture)],
        "doc_to_text": "<image>\n{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": True,
            }
        ],
    }


def command(address: str) -> None:
    """The harness's own command, with a task in a YAML file and without a picture."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test.jsonl").write_text(json.dumps({"question": "What is 2 + 2?", "answer": "4"}) + "\n")
        (folder / "sums.yaml").write_text(
            f"""
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "test.jsonl"}}}, cache_dir: {folder}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 8}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
        )
        words = ("--model", "kestrel-grpc", "--model_args", f"address={address}", "--include_path", str(folder))
        done = subprocess.run(
            (sys.executable, "-m", "kestrel_client.lm_eval_model", "run", *words, "--tasks", "sums"),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "exact_match" in done.stdout, done.stdout
    assert "1" in done.stdout.split("exact_match")[1].splitlines()[0], done.stdout
    print("the command lm_eval with a task without pictures: exact match 1")


def refusals(address: str, picture: Image.Image) -> None:
    model = get_model("kestrel-grpc")(address=address)

    def ask(*arguments: Any) -> list[str]:
        return model.generate_until([Instance("generate_until", {}, arguments, 0)])

    assert ask("What is 2 + 2?", {"max_gen_toks": 8}) != [""]
    for arguments in (
        ("What?", {}, {"visual": [picture, picture]}),
        ("What?", {"num_beams": 2}, {"visual": [picture]}),
    ):
        try:
            ask(*arguments)
        except ValueError as error:
            print(f"refused: {error}")
        else:
            raise AssertionError(f"{arguments} was not refused")
    try:
        model.loglikelihood([])
    except NotImplementedError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("likelihoods were not refused")


if __name__ == "__main__":
    main()

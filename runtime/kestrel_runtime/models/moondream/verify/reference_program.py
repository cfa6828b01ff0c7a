"""Runs the public reference implementation on the questions of a fixture, as a program of its own.

Runs in the environment of the reference: it needs torch, transformers and safetensors, and imports nothing of this
project. It reads `questions.json` and writes `expected.json`, `expected.safetensors` and `reference.json`.

    python reference_program.py FOLDER MODEL REVISION DEVICE WEIGHTS...

REVISION is "" for a local MODEL; WEIGHTS are the files of its weights. The exit status is 3 where the environment
has no transformers.

The reference computes in bfloat16 unless it is changed; here it computes in float32: weights and pixels, which it
rounds to bfloat16, are restored exactly. Tensors are read where its own methods return them.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

NOT_INSTALLED = 3
_EVERY = 9
_NUM_ENDS = 8
"""The rows of image embeddings, and of keys and values, that fixtures contain."""


class Unsupported(Exception):
    """The reference has no such skill or argument."""


class Reference:
    """A model of the reference, and what its methods returned for the last prompt."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._inner = getattr(model, "model", None)
        self.notes: list[str] = []
        """Notes of what was changed in the reference, and of what it did not offer."""
        self._pixels: Tensor | None = None
        self._grid: tuple[int, int] | None = None
        self._embeddings: Tensor | None = None
        self._prompts: list[tuple[list[int], Tensor, Tensor]] = []
        if self._inner is None:
            self.notes.append("the reference has no inner model: tensors were not compared")
            return
        self._compute_in_float32(self._inner)
        module = sys.modules[type(self._inner).__module__]
        self._watch(module, "prepare_crops", lambda args, result: setattr(self, "_grid", tuple(result[1])))
        self._watch(self._inner, "_run_vision_encoder", self._keep_embeddings)
        self._watch(self._inner, "_prefill_prompt", self._keep_prompt)

    def _compute_in_float32(self, inner: Any) -> None:
        if hasattr(inner, "_refresh_runtime_buffers"):
            inner._refresh_runtime_buffers()
        if getattr(inner, "use_flex_decoding", False):
            inner.use_flex_decoding = False
            self.notes.append("flex attention was turned off: it needs a compiler")
        if not _has_rotary_frequencies(inner):
            raise RuntimeError("this version of transformers leaves buffers uninitialised: install transformers<5")
        resizing: list[Any] = [module for name, module in sys.modules.items() if name.endswith("image_crops")]
        for module in resizing:
            if getattr(module, "HAS_VIPS", False):
                module.HAS_VIPS = False
                self.notes.append("images were resized with Pillow instead of libvips")
        encode = getattr(inner, "_vis_enc", None)
        if encode is None:
            self.notes.append("the reference has no method _vis_enc: its pixels may be rounded to bfloat16")
            return

        def encode_exactly(crops: Tensor) -> Any:
            self._pixels, exact = exact_pixels(crops)
            if self._pixels is None:
                self.notes.append(f"pixels of {crops.dtype} could not be restored exactly")
            return encode(exact)

        inner._vis_enc = encode_exactly

    def _watch(self, owner: Any, name: str, keep: Callable[[tuple[Any, ...], Any], None]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            self.notes.append(f"the reference has no {name}: what it returns was not compared")
            return

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            keep(args, result)
            return result

        setattr(owner, name, watched)

    def _keep_embeddings(self, args: tuple[Any, ...], result: Tensor) -> None:
        self._embeddings = result

    def _keep_prompt(self, args: tuple[Any, ...], result: tuple[Any, ...]) -> None:
        logits, hidden = result[:2]
        self._prompts.append((args[0][0].tolist(), logits[0], hidden[0, -1]))

    @torch.inference_mode()
    def read_prompt(self, image: Any, question: str) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
        """Encodes an image and asks a question about it.

        Returns the encoded image, facts for `expected.json`, and tensors by name.
        """
        self._pixels = self._grid = self._embeddings = None
        self._prompts.clear()
        encoded = self._model.encode_image(image)
        facts: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        if self._pixels is not None and self._grid is not None:
            facts |= {"tiling": list(self._grid), "n_crops": len(self._pixels)}
            tensors |= {"global_crop_u8": self._pixels[0], "last_crop_u8": self._pixels[-1]}
        if self._embeddings is not None:
            tensors["image_embeddings_every_9th"] = self._embeddings[::_EVERY]
        tensors |= self._last_cache(encoded)
        self.answer(encoded, {"skill": "query", "args": {"question": question}}, 1)
        if self._prompts:
            ids, tensors["query_prompt_logits"], tensors["query_prompt_last_hidden"] = self._prompts[0]
            facts["query_prompt_tokens"] = ids
        return encoded, facts, {name: _on_host(tensor) for name, tensor in tensors.items()}

    def _last_cache(self, encoded: Any) -> dict[str, Tensor]:
        """Returns keys and values of the last layer; those of Moondream 3 are in no fixture of the reference."""
        caches = getattr(encoded, "caches", None)
        names = (name for name, _ in self._inner.named_modules()) if caches and self._inner is not None else ()
        if not caches or any(name.endswith(".tau") for name in names):
            return {}
        keys, values = caches[-1]
        return {"last_layer_k_first8": keys[0, :, :_NUM_ENDS], "last_layer_v_last8": values[0, :, -_NUM_ENDS:]}

    @torch.inference_mode()
    def answer(self, image: Any, call: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        """Returns the greedy answer to a call, as `expected.json` holds it. Raises `Unsupported`."""
        skill, args = call["skill"], call["args"]
        method = getattr(self._model, skill, None)
        if skill not in _READERS or method is None:
            raise Unsupported(f"the reference has no {skill}")
        known = inspect.signature(method).parameters
        settings: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens}
        given: dict[str, Any] = {"settings": settings}
        for name, value in args.items():
            if name == "max_objects":
                settings[name] = value
            elif name in known:
                given[name] = value
            elif value:
                raise Unsupported(f"the reference has no {skill} with {name}")
        if skill == "query" and "reasoning" in known:
            given.setdefault("reasoning", False)
        if image is not None:
            given["image"] = image
        return _READERS[skill](method(**given), bool(given.get("reasoning")))


def _has_rotary_frequencies(inner: Any) -> bool:
    """Returns True if the buffer of rotary frequencies, if any, holds cosine 1 and sine 0 for position 0."""
    frequencies = getattr(getattr(inner, "text", None), "freqs_cis", None)
    if frequencies is None:
        return True
    first = torch.view_as_real(frequencies[0]) if frequencies.is_complex() else frequencies[0]
    return bool((first[..., 0] == 1).all() and (first[..., 1] == 0).all())


def _read_query(result: dict[str, Any], with_reasoning: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {"answer": result["answer"]}
    if with_reasoning:
        reasoning = result["reasoning"]
        grounding = [
            {name: item[name] for name in ("start_idx", "end_idx")}
            | {"points": [[float(side) for side in point] for point in item["points"]]}
            for item in reasoning.get("grounding", [])
        ]
        answer["reasoning"] = {"text": reasoning["text"], "grounding": grounding}
    return answer


def _places(key: str) -> Callable[[dict[str, Any], bool], dict[str, Any]]:
    return lambda result, _: {key: [{name: float(side) for name, side in place.items()} for place in result[key]]}


_READERS: dict[str, Callable[[dict[str, Any], bool], dict[str, Any]]] = {
    "query": _read_query,
    "caption": lambda result, _: {"caption": result["caption"]},
    "point": _places("points"),
    "detect": _places("objects"),
}


def exact_pixels(crops: Tensor) -> tuple[Tensor | None, Tensor]:
    """Returns the bytes of crops [crops, 3, side, side] as [crops, side, side, 3], and the crops in exact float32.

    The reference maps each byte to (byte / 255 - 0.5) / 0.5 in the type of `crops`. The 256 results differ, also
    where they are rounded, so that the bytes can be found again. Returns None and the crops as they are where they
    hold other values.
    """
    all_bytes = torch.arange(256, device=crops.device)
    rounded = all_bytes.to(crops.dtype).div_(255.0).sub_(0.5).div_(0.5).float()
    places = torch.searchsorted(rounded, crops.float().contiguous()).clamp_(max=255)
    if not torch.equal(rounded[places], crops.float()):
        return None, crops.float()
    exact = all_bytes.float().div_(255.0).sub_(0.5).div_(0.5)
    return places.to(torch.uint8).permute(0, 2, 3, 1), exact[places]


def _on_host(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dtype == torch.uint8 else tensor.float()).cpu().clone().contiguous()


def record(model: Any, folder: Path, log: Callable[[str], None]) -> list[str]:
    """Answers `questions.json` of a folder, and writes `expected.json` and `expected.safetensors`; returns notes.

    A call that the reference cannot answer stays without `expect`.
    """
    reference = Reference(model)
    expected = json.loads((folder / "questions.json").read_text())
    tensors: dict[str, Tensor] = {}
    groups: list[tuple[str | None, list[dict[str, Any]]]] = [
        (entry["image"], entry["calls"]) for entry in expected["images"]
    ]
    for index, (name, calls) in enumerate([*groups, (None, expected["text_only"])]):
        image = None
        log(f"reference: {name or 'without an image'}")
        if name is not None:
            entry = expected["images"][index]
            picture = Image.open(folder / name).convert("RGB")
            image, facts, found = reference.read_prompt(picture, entry["query_prompt"])
            entry.update(facts)
            tensors |= {f"{index}.{key}": tensor for key, tensor in found.items()}
        for call in calls:
            try:
                call["expect"] = reference.answer(image, call, expected["max_tokens"])
            except Unsupported as error:
                reference.notes.append(str(error))
            except Exception as error:  # of code that is not ours: one call less to compare
                reference.notes.append(f"the reference failed in {call['skill']}: {type(error).__name__}: {error}")
    save_file(tensors, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))
    return list(dict.fromkeys(reference.notes))


@torch.inference_mode()
def restore_weights(model: Any, files: Sequence[str]) -> list[str]:
    """Copies the weights from their files to a float32 model, which has rounded them to bfloat16; returns notes.

    A file in another layout than the model's is left out.
    """
    own = model.state_dict()
    restored: set[str] = set()
    for file in files:
        stored = load_file(file) if file.endswith(".safetensors") else {}
        for name in stored.keys() & own.keys():
            if stored[name].shape == own[name].shape:
                own[name].copy_(stored[name])
                restored.add(name)
    missing = len(own) - len(restored)
    return [f"{missing} of {len(own)} tensors of weights stay as the reference has loaded them"] if missing else []


def main(folder: Path, name: str, revision: str, device: str, *weights: str) -> int:
    """Loads the reference and has it answer; returns the exit status."""
    if importlib.util.find_spec("transformers") is None:
        return NOT_INSTALLED
    # Installed for the reference, where it is; this project does not depend on it.
    transformers = importlib.import_module("transformers")
    print("reference: loading", flush=True)
    options = {"revision": revision} if revision else {}
    loader = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(name, trust_remote_code=True, **options)
    model = model.to(device=device, dtype=torch.float32).eval()
    notes = restore_weights(model, weights)
    notes += record(model, folder, lambda line: print(line, flush=True))
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["transformers"] = transformers.__version__
    facts = {"model": name, "revision": revision, "device": device, "versions": versions, "notes": notes}
    (folder / "reference.json").write_text(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))

"""Uploads of adapters with any parts in any order. `upload` is what must hold for each."""

import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from kestrel_client.v1 import engine_service_pb2 as wire
from kestrel_grpc.adapter_folder import AdapterExists, AdapterFolder
from kestrel_grpc.calls.call_context import CallContext
from kestrel_grpc.calls.errors import describe
from kestrel_grpc.frontends.grpc.adapter_uploads import AdapterUploads
from kestrel_runtime.api.adapters import AdapterName
from kestrel_runtime.api.errors import AdapterInvalid, InvalidRequest
from tests.fakes import FakeEngine

_MAX_BYTES = 5_000
_OLD = b"old weights"

_names = st.one_of(
    st.sampled_from(("a", "a@7", "a/b", "team/a", "old", "old/b", "link", "out/a", "file", "file/a", "trained")),
    st.sampled_from(("", "..", "../a", "a/..", "/a", "a/", ".upload-1", "a\x00", "a.safetensors", "a\\b", "é")),
    st.text("abA0./@_-\\ ", max_size=12),
    st.text(max_size=150),
)
_weights = st.one_of(st.binary(max_size=300), st.just(b"broken weights"), st.just(bytes(_MAX_BYTES)))
_headers = st.builds(
    wire.AdapterHeader,
    name=_names,
    size_bytes=st.one_of(st.integers(-1, 20), st.integers(-(2**63), 2**63 - 1)),
    sha256=st.sampled_from(("", "0" * 64, "AB")),
    config=st.one_of(st.none(), st.binary(max_size=50)),
    replace=st.booleans(),
)


def _parts(name: str, data: bytes, replaces: bool, cut: int, more: list[bytes]) -> list[wire.UploadAdapterRequest]:
    """An upload that is complete but for what is cut off or added."""
    header = wire.AdapterHeader(
        name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), replace=replaces
    )
    chunks = [data[start : start + 100] for start in range(0, len(data), 100)]
    kept = chunks[: max(0, len(chunks) - cut)]
    return [
        wire.UploadAdapterRequest(header=header),
        *(wire.UploadAdapterRequest(chunk=chunk) for chunk in (*kept, *more)),
    ]


_any_part = st.one_of(
    st.builds(wire.UploadAdapterRequest, header=_headers),
    st.builds(wire.UploadAdapterRequest, chunk=st.binary(max_size=50)),
    st.just(wire.UploadAdapterRequest()),
)
uploads: st.SearchStrategy[list[wire.UploadAdapterRequest]] = st.one_of(
    st.builds(_parts, _names, _weights, st.booleans(), st.sampled_from((0, 0, 0, 1)), st.just([])),
    st.builds(_parts, _names, _weights, st.booleans(), st.just(0), st.lists(st.binary(max_size=9), max_size=2)),
    st.lists(_any_part, max_size=4),
)


def upload(parts: Sequence[wire.UploadAdapterRequest]) -> str:
    """Send these parts; returns the reason of the refusal. Only a whole and good adapter may change the folder."""
    with tempfile.TemporaryDirectory() as folder:
        root = _prepared(Path(folder))
        before = _content(Path(folder))
        engine = FakeEngine()
        engine.info = replace(engine.info, config=replace(engine.info.config, adapters=str(root)))
        receiver = AdapterUploads(engine, AdapterFolder(str(root), ("hub/a",), _MAX_BYTES - 1), 30.0)
        outcome = asyncio.run(_outcome(receiver, parts))
        after = _content(Path(folder))
    if not isinstance(outcome, wire.UploadAdapterResponse):
        assert isinstance(outcome, InvalidRequest | AdapterInvalid | AdapterExists), repr(outcome)
        assert after == before
        return describe(outcome).reason
    header, data = parts[0].header, b"".join(part.chunk for part in parts[1:])
    name = AdapterName.parse(header.name)
    assert name is not None
    folder_name = name.folders()[0]
    written = {f"adapters/{folder_name}/adapter_model.safetensors": data}
    if header.HasField("config"):
        written[f"adapters/{folder_name}/adapter_config.json"] = header.config
    kept = {path: content for path, content in before.items() if not path.startswith(f"adapters/{folder_name}/")}
    assert after == {**kept, **written}
    assert header.replace == outcome.replaced or not outcome.replaced
    assert engine.changed_adapters == [header.name]
    return "replaced" if outcome.replaced else "added"


async def _outcome(
    receiver: AdapterUploads, parts: Sequence[wire.UploadAdapterRequest]
) -> wire.UploadAdapterResponse | Exception:
    async def messages() -> AsyncIterator[wire.UploadAdapterRequest]:
        for part in parts:
            yield part

    try:
        return await receiver.receive(messages(), CallContext((), None, "kestrel.v1.EngineService/UploadAdapter"))
    except Exception as error:  # the caller looks at its type
        return error


def _prepared(folder: Path) -> Path:
    """A folder of adapters with one of each kind of entry that an upload may meet, and one outside of it."""
    root = folder / "adapters"
    for path in (root / "old", root / "trained", folder / "outside" / "a"):
        path.mkdir(parents=True)
        (path / "adapter_model.safetensors").write_bytes(_OLD)
    (root / "trained" / "optimizer.pt").write_bytes(_OLD)
    (root / "file").write_bytes(_OLD)
    os.symlink("old", root / "link")
    os.symlink(folder / "outside", root / "out")
    return root


def _content(folder: Path) -> dict[str, bytes]:
    """The files, and what each link leads to; an empty folder counts, too."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[f"{name}/"] = os.fsencode(os.readlink(path))
        elif path.is_file():
            found[name] = path.read_bytes()
        elif not any(path.iterdir()):
            found[f"{name}/"] = b""
    return found

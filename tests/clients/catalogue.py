"""Lists the clients of others that `make test-clients` runs: their pinned packages and their programs."""

import re
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")


@dataclass(frozen=True)
class Client:
    """A program in `PROGRAMS`, and the packages that it needs.

    `arguments` are those of the installer, packages with exact versions; the first package names the row of the
    matrix. The suffix of the program says whose packages they are: Python's, Node.js's, or Debian's for Ruby.
    """

    name: str
    program: str
    arguments: tuple[str, ...]
    interface: str = ""
    """The interface of the server that it uses, as the matrix names it."""
    in_ci: bool = True
    """Runs with all others in CI. The rest runs with `ALL=1`, or where it is named."""
    in_matrix: bool = True

    @property
    def is_node(self) -> bool:
        return self.program.endswith(".mjs")

    @property
    def is_ruby(self) -> bool:
        return self.program.endswith(".rb")

    @property
    def packages(self) -> tuple[str, ...]:
        """Returns the names of the packages, without versions and extras."""
        named = (item for item in self.arguments if not item.startswith("--") and "/clients/python" not in item)
        return tuple(re.sub(r"(?<=.)(@|==|\[).*", "", item) for item in named)

    def newest(self) -> tuple[str, ...]:
        """Returns the arguments without versions."""
        return tuple(re.sub(r"(?<=.)(@|==)[\w.]+$", "", item) for item in self.arguments)


def _openai(name: str, program: str, *arguments: str, in_ci: bool = True) -> Client:
    return Client(name, program, arguments, "OpenAI's API", in_ci)


def _grpc(name: str, program: str, *arguments: str, in_ci: bool = True) -> Client:
    return Client(name, program, arguments, "gRPC", in_ci)


CLIENTS = (
    _openai("openai", "openai_python.py", "openai==3.57.0"),
    _openai("openai-node", "openai_node.mjs", "openai@7.59.0"),
    _openai("litellm", "litellm_python.py", "litellm==1.110.2", in_ci=False),
    _openai("llama-index", "llama_index_python.py", "llama-index-llms-openai-like==0.8.1", in_ci=False),
    _openai("haystack", "haystack_python.py", "haystack-ai==3.4.1", in_ci=False),
    _openai("inspect-ai", "inspect_python.py", "inspect-ai==0.3.285", "openai==3.57.0", in_ci=False),
    _openai("strands", "strands_python.py", "strands-agents[openai]==1.62.0", in_ci=False),
    _openai("langchain", "langchain_python.py", "langchain-openai==1.7.4", in_ci=False),
    _openai("instructor", "instructor_python.py", "instructor==1.17.0"),
    _openai("pydantic-ai", "pydantic_ai_python.py", "pydantic-ai-slim[openai]==2.68.0"),
    _openai("smolagents", "smolagents_python.py", "smolagents[openai]==1.26.0"),
    _openai("openai-agents", "openai_agents_python.py", "openai-agents==0.24.0", in_ci=False),
    _openai(
        "ai-sdk",
        "ai_sdk_node.mjs",
        "ai@7.0.173",
        "@ai-sdk/openai-compatible@3.0.92",
        "@ai-sdk/openai@4.0.118",
        "zod@4.6.7",
    ),
    # Without its dependencies: one of them is a closed engine, which this client does not need for HTTP.
    Client("moondream", "moondream_python.py", ("--no-deps", "moondream==2.6.1", "pillow==12.0.0"), "REST"),
    Client("triton", "triton_python.py", ("tritonclient[grpc]==2.73.0",), "Triton's API"),
    _grpc("grpclib", "grpclib_python.py", "grpclib[protobuf]==0.4.9", "googleapis-common-protos==1.76.0"),
    _grpc(
        "betterproto2",
        "betterproto2_python.py",
        "betterproto2[grpclib]==0.10.0",
        "betterproto2-compiler==0.10.1",
        in_ci=False,
    ),
    _grpc("grpc-js", "grpc_js_node.mjs", "@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.1"),
    _grpc(
        "connect-node",
        "connect_node.mjs",
        "@connectrpc/connect-node@2.3.0",
        "@connectrpc/connect@2.3.0",
        "@bufbuild/protobuf@2.17.0",
        "@bufbuild/protoc-gen-es@2.17.0",
    ),
    _grpc(
        "nice-grpc",
        "nice_grpc_node.mjs",
        "nice-grpc@2.1.18",
        "nice-grpc-error-details@0.2.12",
        "@grpc/proto-loader@0.8.1",
        in_ci=False,
    ),
    # Packages of Debian have the versions of the release.
    _grpc(
        "ruby",
        "grpc_ruby.rb",
        "ruby-grpc",
        "protobuf-compiler",
        "protobuf-compiler-grpc",
        "libprotobuf-dev",
        in_ci=False,
    ),
    # Finds the model of our client, which it has to be installed with.
    Client(
        "frames-video",
        "frames_video_python.py",
        ("av==18.1.0", "pillow==12.0.0", "--editable", str(CHECKOUT / "clients/python")),
        in_matrix=False,
    ),
    Client(
        "lm-eval",
        "lm_eval_python.py",
        ("--editable", f"{CHECKOUT / 'clients/python'}[lm-eval]"),
        in_ci=False,
        in_matrix=False,
    ),
)

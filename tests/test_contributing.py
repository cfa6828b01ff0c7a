"""CONTRIBUTING.md: what it lists exists, and every skill is at the places that it lists."""

import argparse
import re

import pytest

from kestrel_client import AsyncClient, Client
from kestrel_grpc.cli.ask import add_client_commands
from kestrel_grpc.cli.chat import add_chat_command
from kestrel_grpc.frontends.grpc.vision_service import BINDINGS
from kestrel_grpc.frontends.rest.requests import ROUTES
from kestrel_runtime.api.requests import REQUEST_TYPES
from kestrel_runtime.models.moondream.skills import SKILLS
from tests.fakes import SKILLS as FAKE_SKILLS
from tests.reference_fixtures import CHECKOUT

DOCUMENT = (CHECKOUT / "CONTRIBUTING.md").read_text(encoding="utf-8")
# What is not a path from the root of the checkout.
RELATIVE = {"kestrel_runtime/api/errors.py", "kestrel_runtime/api/stream.py"}


def test_every_path_that_is_named_exists():
    named = {word for word in re.findall(r"`([\w./-]+)`", DOCUMENT) if "/" in word} - RELATIVE
    assert len(named) > 20
    assert sorted(name for name in named if not (CHECKOUT / name).exists()) == []


@pytest.mark.parametrize("skill", sorted(SKILLS))
def test_every_skill_is_at_each_place(skill):
    assert skill in {kind.skill for kind in REQUEST_TYPES}
    assert skill.capitalize() in {binding.rpc.removesuffix("Image") for binding in BINDINGS}
    assert skill in ROUTES
    assert callable(getattr(Client, skill))
    assert callable(getattr(AsyncClient, skill))
    assert skill in FAKE_SKILLS
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_client_commands(commands)
    add_chat_command(commands)
    assert skill in commands.choices


def test_every_command_that_is_named_is_one_of_the_makefile():
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", DOCUMENT, re.MULTILINE))
    assert named <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))

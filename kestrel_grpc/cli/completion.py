"""Implements `kestrel-grpc completion`: prints a shell script that completes commands and their options.

argcomplete does the work. The script calls `kestrel-grpc` again for each completion, so that it always has the
commands of the installed version.
"""

from __future__ import annotations

import argparse

_SHELLS = ("bash", "zsh", "fish")
# Loads zsh's completion system, which defines `compdef`; the script calls it.
_ZSH_COMPLETIONS = "(( ${+functions[compdef]} )) || { autoload -Uz compinit && compinit -i }"


def add_completion_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command; it sets `run`, which takes the parsed arguments and returns the exit status."""
    parser = subparsers.add_parser(
        "completion",
        help="print the script with which a shell completes commands and options",
        description="Print the script with which a shell completes commands, options and file names. Each start of "
        'the shell has to read it: eval "$(kestrel-grpc completion bash)" at the end of ~/.bashrc, the same with '
        "zsh in ~/.zshrc, kestrel-grpc completion fish | source in ~/.config/fish/config.fish. In zsh it may also "
        "be a file _kestrel-grpc in a folder of $fpath, which is read at the first Tab.",
    )
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=_print_script)


def _print_script(arguments: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    script = shellcode(["kestrel-grpc"], shell=arguments.shell)
    if arguments.shell == "zsh":
        first, _, rest = script.partition("\n")  # "#compdef", which must be the first line of a file in $fpath
        script = f"{first}\n{_ZSH_COMPLETIONS}\n{rest}"
    print(script)
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers the shell, if it is the one that runs this process, and ends the process; otherwise does nothing."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False)

"""Completion scripts of bash, zsh and fish."""

from collections.abc import Callable, Iterator, Sequence

from quire_cli.completion.words import Flag, Typed, first_words, second_words, typed_commands

_INSTALL = "# Completion of quire in {shell}, made by quire completion {shell}. To use it: {how}"
_HOW = {
    "bash": "source <(quire completion bash), in ~/.bashrc",
    "zsh": "source <(quire completion zsh), in ~/.zshrc behind compinit",
    "fish": "quire completion fish > ~/.config/fish/completions/quire.fish",
}


def bash() -> str:
    """Returns the script for bash."""
    commands = typed_commands()
    return "\n".join(
        (
            _head("bash"),
            "_quire() {",
            '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} at=1 command="" words=""',
            "    [[ ${COMP_WORDS[1]} == help ]] && at=2",
            "    COMPREPLY=()",
            f'    ((COMP_CWORD == at)) && words="{" ".join(first_words())}"',
            "    command=${COMP_WORDS[at]}",
            "    case $command in",
            *(
                f'        {first}) ((COMP_CWORD == at + 1)) && words="{" ".join(seconds)}"; '
                'command+=" ${COMP_WORDS[at+1]}" ;;'
                for first, seconds in second_words().items()
            ),
            "    esac",
            '    if [[ $words ]]; then COMPREPLY=($(compgen -W "$words" -- "$cur")); return; fi',
            '    case "$command $prev" in',
            *(line for typed in commands for line in _bash_values(typed)),
            "    esac",
            "    case $command in",
            *(
                f'        "{each.command.name}") words="'
                f'{" ".join([*each.operands, *(name for flag in each.flags for name in flag.names)])}" ;;'
                for each in commands
            ),
            "    esac",
            '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            f'    case "$command $cur" in *" -"*) ;; {_bash_files(commands)} compopt -o default ;; esac',
            "} && complete -F _quire quire\n",
        )
    )


def _bash_values(typed: Typed) -> Iterator[str]:
    name = typed.command.name
    for flag in typed.flags:
        pattern = "|".join(f'"{name} {each}"' for each in flag.names)
        if flag.value == "words":
            yield f'        {pattern}) COMPREPLY=($(compgen -W "{" ".join(flag.words)}" -- "$cur")); return ;;'
        elif flag.value == "file":
            yield f"        {pattern}) compopt -o default; return ;;"
        elif flag.value == "other":
            yield f"        {pattern}) return ;;"


def _bash_files(commands: Sequence[Typed]) -> str:
    return "|".join(f'"{each.command.name} "*' for each in commands if each.takes_files) + ")"


def zsh() -> str:
    """Returns the script for zsh."""
    seconds = second_words()
    return "\n".join(
        (
            "#compdef quire",
            _head("zsh"),
            "_quire() {",
            "    local -a list",
            "    [[ $words[2] == help ]] && { shift words; ((CURRENT--)) }",
            "    if ((CURRENT == 2)); then",
            f"        list=({' '.join(_quote(f'{word}:{text}') for word, text in first_words().items())})",
            "        _describe command list; return",
            "    fi",
            "    shift words; ((CURRENT--))",
            "    case $words[1] in",
            f"        {'|'.join(seconds)})",
            "            if ((CURRENT == 2)); then",
            "                case $words[1] in",
            *(f"                    {first}) compadd -- {' '.join(each)} ;;" for first, each in seconds.items()),
            "                esac",
            "                return",
            "            fi",
            '            words[2]="$words[1] $words[2]"; shift words; ((CURRENT--)) ;;',
            "    esac",
            '    case "$words[1]" in',
            *(line for typed in typed_commands() for line in _zsh_command(typed)),
            "    esac",
            "}",
            'if [[ $funcstack[1] == _quire ]]; then _quire "$@"; else compdef _quire quire; fi\n',
        )
    )


def _zsh_command(typed: Typed) -> Iterator[str]:
    yield f'        "{typed.command.name}") _arguments \\'
    for flag in typed.flags:
        for name in flag.names:
            yield f"            {_quote(_zsh_flag(flag, name))} \\"
    operands = f"({' '.join(typed.operands)})" if typed.operands else "_files" if typed.takes_files else ""
    yield f"            '*: :{operands}' ;;"


def _zsh_flag(flag: Flag, name: str) -> str:
    summary = "".join(f"\\{each}" if each in "[]:\\" else each for each in flag.summary)
    action = {"words": f":value:({' '.join(flag.words)})", "file": ":file:_files", "other": ":value: ", "none": ""}
    return f"*{name}[{summary}]{action[flag.value]}"


def fish() -> str:
    """Returns the script for fish."""
    lines = [
        _head("fish"),
        "function __quire_is",
        "    set -l words (commandline -opc)",
        '    test "$words[2]" = help; and set -e words[2]',
        "    set -l last (math (count $argv) + 1)",
        '    test "$words[2..$last]" = "$argv"',
        "end",
        "function __quire_first",
        "    set -l words (commandline -opc)",
        '    test "$words[2]" = help; and set -e words[2]',
        "    test (count $words) -eq 1",
        "end",
        "function __quire_second",
        "    set -l words (commandline -opc)",
        '    test "$words[2]" = help; and set -e words[2]',
        '    test (count $words) -eq 2; and test "$words[2]" = "$argv[1]"',
        "end",
        "complete -c quire -f",
    ]
    for word, text in first_words().items():
        lines.append(f"complete -c quire -n __quire_first -a {word} -d {_quote(text)}")
    for first, seconds in second_words().items():
        lines.append(f"complete -c quire -n '__quire_second {first}' -a '{' '.join(seconds)}'")
    for typed in typed_commands():
        begin = f"complete -c quire -n '__quire_is {typed.command.name}'"
        lines += [f"{begin} -F"] if typed.takes_files else []
        lines += [f"{begin} -a '{' '.join(typed.operands)}'"] if typed.operands else []
        lines += [f"{begin} {_fish_flag(flag)}" for flag in typed.flags]
    return "\n".join(lines) + "\n"


def _fish_flag(flag: Flag) -> str:
    names = " ".join(f"-l {each[2:]}" if each.startswith("--") else f"-s {each[1:]}" for each in flag.names)
    value = {"words": f"-x -a '{' '.join(flag.words)}'", "file": "-r -F", "other": "-x", "none": ""}[flag.value]
    return f"{names} {value} -d {_quote(flag.summary)}"


SHELLS: dict[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _head(shell: str) -> str:
    return _INSTALL.format(shell=shell, how=_HOW[shell])


def _quote(text: str) -> str:
    """Returns a word in single quotes that all three shells read alike."""
    return "'" + text.replace("'", "’") + "'"

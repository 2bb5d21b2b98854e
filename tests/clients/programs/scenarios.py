"""What each client does, and the form in which it says what it saw. Shared by the programs in Python."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

_GIVEN = json.loads((Path(__file__).parent / "scenarios.json").read_text())
FIRST, SECOND, CITIES, TOOL = (_GIVEN[name] for name in ("first", "second", "cities", "tool"))
PARAMETERS, ENDLESS, FORCED, RESULT = (_GIVEN[name] for name in ("parameters", "endless", "forced", "result"))


def with_result(message: Mapping[str, object], call_id: str) -> list[object]:
    """The conversation in which the tool that ``message`` calls has answered."""
    return [*CITIES, message, {"role": "tool", "tool_call_id": call_id, "content": RESULT}]


def run(clients: Mapping[str, Mapping[str, Callable[[], object]]]) -> None:
    """Prints what each scenario of each client gave, or the error that it raised, as one JSON object."""
    print(json.dumps({client: {name: _tried(act) for name, act in acts.items()} for client, acts in clients.items()}))


def _tried(act: Callable[[], object]) -> object:
    try:
        return act()
    except Exception as error:  # noqa: BLE001 (what a client raises is what the test looks at)
        return {"error": f"{type(error).__name__}: {error}"}

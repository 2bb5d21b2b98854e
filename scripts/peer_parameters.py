"""Lists the request parameters of other servers from their distributions: ``peer_parameters.py FOLDER``.

FOLDER holds unpacked distributions, each in a folder of its own with the name of the peer. The names are facts; nothing
else of a distribution is kept. Python sources are parsed and never imported.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LISTS = Path(__file__).parents[1] / "tests" / "peers" / "parameters"
_JSON_VALUE = r"json_value\(\s*{0},\s*\"(\w+)\"|\b{0}\.(?:at|contains|count)\(\"(\w+)\"\)"


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a peer states its parameters. ``places`` maps a place of a request to the classes, or the methods, of the
    files in ``python`` that list its names; ``cpp`` maps it to (file, variable), whose keys a C++ server reads.
    """

    distribution: str
    python: Sequence[str] = ()
    places: Mapping[str, Sequence[str]] = field(default_factory=dict)
    cpp: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)


_CPP = "vendor/llama.cpp/tools/server/"
_COMMON, _CHAT, _CONTEXT, _SCHEMA = (f"{_CPP}server-{name}.cpp" for name in ("common", "chat", "context", "schema"))
_PARAMS = {"chat": ["CompletionCreateParamsBase"], "completions": ["CompletionCreateParamsBase"]}

PEERS: Mapping[str, Peer] = {
    "vllm": Peer(
        "vllm",
        ("vllm/entrypoints/**/protocol.py", "vllm/sampling_params.py"),
        {
            "chat": ["ChatCompletionRequest"],
            "chat.tools": ["ChatCompletionToolsParam"],
            "completions": ["CompletionRequest"],
            "stream_options": ["StreamOptions"],
            "response_format": ["ResponseFormat", "StructuralTagResponseFormat"],
            "response_format.json_schema": ["JsonSchemaResponseFormat"],
            "structured_outputs": ["StructuredOutputsParams"],
            "responses": ["ResponsesRequest"],
            "messages": ["AnthropicMessagesRequest"],
            "messages.tools": ["AnthropicTool"],
            "messages.tool_choice": ["AnthropicToolChoice"],
            "messages.output_config": ["AnthropicOutputConfig"],
            "messages.thinking": ["AnthropicThinkingConfigEnabled", "AnthropicThinkingConfigAdaptive"],
            "count_tokens": ["AnthropicCountTokensRequest"],
            "embeddings": ["EmbeddingCompletionRequest", "EmbeddingChatRequest", "EmbeddingBatchChatRequest"],
            "score": [
                *("ScoreDataRequest", "ScoreTextRequest"),
                *("ScoreQueriesDocumentsRequest", "ScoreQueriesItemsRequest"),
            ],
            "rerank": ["RerankRequest"],
            "tokenize": ["TokenizeCompletionRequest", "TokenizeChatRequest"],
            "detokenize": ["DetokenizeRequest"],
        },
    ),
    "sglang": Peer(
        "sglang",
        ("sglang/srt/entrypoints/openai/protocol.py", "sglang/srt/entrypoints/anthropic/protocol.py"),
        {
            "chat": ["ChatCompletionRequest"],
            "chat.tools": ["Tool"],
            "chat.tools.function": ["Function"],
            "completions": ["CompletionRequest"],
            "stream_options": ["StreamOptions"],
            "response_format": ["ResponseFormat", "StructuresResponseFormat", "LegacyStructuralTagResponseFormat"],
            "response_format.json_schema": ["JsonSchemaResponseFormat"],
            "responses": ["ResponsesRequest"],
            "messages": ["AnthropicMessagesRequest"],
            "messages.tools": ["AnthropicCustomTool"],
            "messages.tool_choice": ["AnthropicToolChoice"],
            "messages.output_config": ["AnthropicOutputConfig"],
            "messages.thinking": ["AnthropicThinkingParam"],
            "count_tokens": ["AnthropicCountTokensRequest"],
            "embeddings": ["EmbeddingRequest"],
            "score": ["ScoringRequest"],
            "rerank": ["V1RerankReqInput"],
            "tokenize": ["TokenizeRequest"],
            "detokenize": ["DetokenizeRequest"],
        },
    ),
    "llama.cpp": Peer(
        "llama-cpp-python",
        cpp={
            "chat": [(_SCHEMA, ""), (_COMMON, "body"), (_CONTEXT, "data")],
            "completions": [(_SCHEMA, ""), (_CONTEXT, "data")],
            "response_format": [(_COMMON, "response_format")],
            "responses": [(_SCHEMA, ""), (_CHAT, "response_body")],
            "messages": [(_SCHEMA, ""), (_CHAT, "body")],
            "messages.thinking": [(_CHAT, "thinking")],
        },
    ),
    "openai": Peer(
        "openai",
        (
            "openai/types/chat/*_param*.py",
            "openai/types/completion_create_params.py",
            "openai/types/responses/*param*.py",
            "openai/types/shared_params/*.py",
            "openai/types/embedding_create_params.py",
        ),
        {
            "chat": ["chat/completion_create_params:CompletionCreateParamsBase"],
            "chat.tools": ["ChatCompletionFunctionToolParam"],
            "chat.tools.function": ["FunctionDefinition"],
            "completions": ["types/completion_create_params:CompletionCreateParamsBase"],
            "stream_options": ["ChatCompletionStreamOptionsParam", "response_create_params:StreamOptions"],
            "response_format": ["ResponseFormatJSONSchema"],
            "response_format.json_schema": ["JSONSchema"],
            "responses": ["response_create_params:ResponseCreateParamsBase"],
            "responses.text": ["ResponseTextConfigParam"],
            "responses.text.format": ["ResponseFormatTextJSONSchemaConfigParam"],
            "responses.reasoning": ["shared_params/reasoning:Reasoning"],
            "responses.tools": ["function_tool_param:FunctionToolParam"],
            "input_tokens": ["input_token_count_params:InputTokenCountParams"],
            "embeddings": ["EmbeddingCreateParams"],
        },
    ),
    "anthropic": Peer(
        "anthropic",
        ("anthropic/types/*.py", "anthropic/types/beta/*.py"),
        {
            "messages": [
                "types/message_create_params:MessageCreateParamsBase",
                "beta/message_create_params:MessageCreateParamsBase",
            ],
            "messages.tools": ["types/tool_param:ToolParam", "beta/beta_tool_param:BetaToolParam"],
            "messages.tool_choice": ["ToolChoiceToolParam", "ToolChoiceAutoParam"],
            "messages.output_config": ["OutputConfigParam", "BetaOutputConfigParam"],
            "messages.output_config.format": ["JSONOutputFormatParam"],
            "messages.thinking": [
                "ThinkingConfigEnabledParam",
                "ThinkingConfigAdaptiveParam",
                "BetaThinkingConfigEnabledParam",
            ],
            "messages.metadata": ["MetadataParam"],
            "count_tokens": [
                "types/message_count_tokens_params:MessageCountTokensParams",
                "beta/message_count_tokens_params:MessageCountTokensParams",
            ],
        },
    ),
    "groq": Peer("groq", ("groq/types/chat/completion_create_params.py",), {"chat": ["CompletionCreateParams"]}),
    "together": Peer(
        "together",
        ("together/types/chat/completion_create_params.py", "together/types/completion_create_params.py",
         "together/types/embedding_create_params.py", "together/types/rerank_create_params.py"),
        {
            "chat": ["chat/completion_create_params:CompletionCreateParamsBase"],
            "completions": ["types/completion_create_params:CompletionCreateParamsBase"],
            "embeddings": ["EmbeddingCreateParams"],
            "rerank": ["RerankCreateParams"],
        },
    ),
    "fireworks": Peer(
        "fireworks-ai",
        ("fireworks/types/chat/completion_create_params.py", "fireworks/types/completion_create_params.py"),
        {
            "chat": ["chat/completion_create_params:CompletionCreateParamsBase"],
            "completions": ["types/completion_create_params:CompletionCreateParamsBase"],
        },
    ),
    "mistral": Peer(
        "mistralai",
        ("mistralai/client/models/chatcompletionrequest.py", "mistralai/client/models/embeddingrequest.py"),
        {"chat": ["ChatCompletionRequest"], "embeddings": ["EmbeddingRequest"]},
    ),
    "openrouter": Peer("openrouter", ("openrouter/components/chatrequest.py",), {"chat": ["ChatRequest"]}),
    "cohere": Peer("cohere", ("cohere/v2/client.py",), {"rerank": ["V2Client.rerank"]}),
    "ollama": Peer("ollama", ("ollama/_types.py",), {"chat": ["ChatRequest", "GenerateRequest", "Options"],
                                                     "embeddings": ["EmbedRequest"]}),
}  # fmt: skip
_NOT_IN_A_BODY = {
    "self",
    "key_order",
    "request_options",
    "extra_headers",
    "extra_query",
    "extra_body",
    "timeout",
    "betas",
    "TYPE",
}
"""Names that a client or a server adds of itself."""


class Classes:
    """The classes of some Python files by their names, read without importing them."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._of_file: dict[str, dict[str, ast.ClassDef]] = {}
        self._dicts: dict[str, list[str]] = {}
        for path in files:
            module = ast.parse(path.read_text(encoding="utf-8"))
            classes = {node.name: node for node in ast.walk(module) if isinstance(node, ast.ClassDef)}
            self._of_file[path.with_suffix("").as_posix()] = classes
            self._dicts.update(_functional_dicts(module))

    def names(self, spec: str) -> set[str]:
        """Returns the fields of a class, with those of its bases; or the parameters of ``Class.method``."""
        file, _, name = spec.rpartition(":")
        name, _, method = name.partition(".")
        found = [classes for path, classes in self._of_file.items() if path.endswith(file) and name in classes]
        if not found:
            raise LookupError(f"no class {spec} in the distribution: its files may have moved")
        if method:
            return {argument for classes in found for argument in _arguments(classes[name], method)}
        return {each for classes in found for each in self._fields(classes[name], classes)}

    def _fields(self, node: ast.ClassDef, siblings: Mapping[str, ast.ClassDef]) -> Iterator[str]:
        for base in map(ast.unparse, node.bases):
            name = base.rpartition(".")[2]
            known = siblings.get(name) or next((each[name] for each in self._of_file.values() if name in each), None)
            if known is not None and known is not node:
                yield from self._fields(known, siblings)
            yield from self._dicts.get(name, ())
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = _alias(statement) or statement.target.id
                if not name.startswith("_") and "ClassVar" not in ast.unparse(statement.annotation):
                    yield name


def _functional_dicts(module: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yields the dicts that are written as ``X = TypedDict("X", {...})``, which may hold Python's own words."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.value.args) > 1:
            keys = node.value.args[1]
            if ast.unparse(node.value.func).endswith("TypedDict") and isinstance(keys, ast.Dict):
                names = [key.value for key in keys.keys if isinstance(key, ast.Constant)]
                yield ast.unparse(node.targets[0]), [str(name) for name in names]


def _alias(statement: ast.AnnAssign) -> str | None:
    """Returns the name that a field has in JSON, where it is another."""
    for node in ast.walk(statement):
        if isinstance(node, ast.keyword) and node.arg == "alias" and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    return None


def _arguments(node: ast.ClassDef, method: str) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == method:
            yield from (argument.arg for argument in (*each.args.args, *each.args.kwonlyargs))


def cpp_names(text: str, variable: str) -> set[str]:
    """Returns the keys that a C++ server reads from ``variable``; with no variable, the fields that it declares."""
    if not variable:
        return set(re.findall(r'(?:add\(\(new field_\w+|add_alias)\("([\w.]+)"', text))
    return {a or b for a, b in re.findall(_JSON_VALUE.format(variable), text)}


def listed(peer: Peer, folder: Path) -> dict[str, list[str]]:
    """Returns the parameters of each place, sorted."""
    classes = Classes([path for pattern in peer.python for path in sorted(folder.glob(pattern))])
    names = {place: set().union(*map(classes.names, specs)) for place, specs in peer.places.items()}
    for place, sources in peer.cpp.items():
        names[place] = {name for file, variable in sources for name in cpp_names((folder / file).read_text(), variable)}
    return {place: sorted(found - _NOT_IN_A_BODY) for place, found in names.items()}


def main(folder: Path) -> None:
    """Writes the list of each peer that is unpacked in ``folder``, and prints the names that are new."""
    for name, peer in PEERS.items():
        if not (folder / name).is_dir():
            continue
        path = LISTS / f"{name}.json"
        before = json.loads(path.read_text())["places"] if path.exists() else {}
        version = (folder / name / "VERSION").read_text().strip()
        places = listed(peer, folder / name)
        for place, names in places.items():
            new = sorted(set(names) - set(before.get(place, ())))
            if new:
                print(f"{name} {version}, {place}: new: {', '.join(new)}")
        content = {"distribution": peer.distribution, "version": version, "places": places}
        path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

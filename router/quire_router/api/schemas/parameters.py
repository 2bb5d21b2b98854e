"""The one table of other servers' parameters (``PARAMETERS``): what a name means at each place of a request that the
place has no field for. Validation refuses, honours and ignores by it, docs/parameters.md is made from it, and a test
holds it against lists of the names that vLLM, SGLang, llama.cpp and the hosted APIs have.

A parameter that would change the answer is never ignored. What stands in the words of chats (``_GENERATION``) has other
words in other APIs: ``{limit}`` is ``max_tokens`` in a chat and ``max_output_tokens`` in the Responses API.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from pydantic import AliasChoices, Field


class Column(StrEnum):
    """What becomes of a parameter."""

    HONOURED = "honoured"
    REFUSED = "refused"
    WITHOUT_EFFECT = "without effect"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of another server. Its ``neutral`` values mean nothing, as null does. Others count for the field
    ``same_as``, after ``convert``. Without such a field they would change the answer and are refused: ``instead`` says
    what to use. A parameter with neither is ignored and named, because it does not change the answer.
    """

    neutral: tuple[object, ...] = ()
    instead: str | None = None
    same_as: str | None = None
    convert: Callable[[Any], object] | None = None

    @property
    def column(self) -> Column:
        """Where it stands in the table."""
        if self.same_as is not None:
            return Column.HONOURED
        return Column.WITHOUT_EFFECT if self.instead is None else Column.REFUSED

    def is_neutral(self, value: object) -> bool:
        """Whether a value means nothing. True is not 1 here."""
        return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.neutral)


Table = Mapping[str, Parameter]


def _ignored(names: str) -> Table:
    return dict.fromkeys(names.split(), Parameter())


def _refused(instead: str, names: str = "", **neutral: Iterable[object]) -> Table:
    """Returns parameters that are refused: ``names`` with any value, and others but for their neutral values."""
    of_names = {name: Parameter((), instead) for name in names.split()}
    return {**of_names, **{name: Parameter(tuple(values), instead) for name, values in neutral.items()}}


def _same(same_as: str, names: str = "", **neutral: Iterable[object]) -> Table:
    """Returns parameters that are honoured as another field."""
    of_names = {name: Parameter(same_as=same_as) for name in names.split()}
    return {**of_names, **{name: Parameter(tuple(values), same_as=same_as) for name, values in neutral.items()}}


def _thinking_switch(value: object) -> object:
    """Returns DeepSeek's or Ollama's switch of thinking as ``chat_template_kwargs``."""
    if isinstance(value, dict) and set(value) == {"type"}:
        value = {"enabled": True, "disabled": False}.get(str(value["type"]))
    if not isinstance(value, bool):
        raise ValueError(
            'it must be true, false, {"type": "enabled"} or {"type": "disabled"}; reasoning_effort says how much, '
            "and max_tokens is the only budget"
        )
    return {"enable_thinking": value, "thinking": value}


def _effort(value: object) -> object:
    """Returns the effort in OpenRouter's ``reasoning``."""
    if isinstance(value, dict) and set(value) == {"effort"}:
        return value["effort"]
    raise ValueError(
        'it must be {"effort": ...}; include_reasoning hides reasoning, chat_template_kwargs switches it, and '
        "max_tokens is the only budget"
    )


def _whole_length(value: object) -> object:
    """Returns text-embeddings-inference's ``truncate`` as ``truncate_prompt_tokens``."""
    if value is True:
        return -1
    raise ValueError(
        "it must be true or false; truncate_prompt_tokens says how many tokens are kept, from the beginning"
    )


_SAMPLERS = "use temperature, top_p, top_k or min_p"
_REPETITION = "use repetition_penalty, frequency_penalty or presence_penalty"
_MEDIA = "only text is supported"
_SERVER_TOOLS = "no tool runs on this server; describe functions in tools, and run them in the client"
_SHOWN = "it has no equivalent; for log-probabilities use {logprobs}"
_NO_BUDGET = "thinking has no budget; use {limit}"
_CHAT = "use /v1/chat/completions"
_TEMPLATE = "put chat_template.jinja into the model's folder"
RENDERED: Final = "use /v1/completions with the prompt that /tokenize makes"
_MODERATION = "there is no moderation; leave it out"

_EXECUTION: Table = _ignored(
    # Where and how a request runs, what is kept of it, and what is told of it besides the answer.
    "background_options billing_policy bootstrap_host bootstrap_port bootstrap_room cache_prompt cache_salt compliance"
    " custom_labels data_parallel_rank debug disagg_prefill_dp_rank ec_transfer_params extra_key id_slot inference_geo"
    " keep_alive kv_transfer_params models n_cache_reuse perf_metrics_in_response prediction prompt_cache_isolation_key"
    " prompt_cache_options prompt_cache_retention provider request_id response_fields return_cached_tokens_details"
    " return_meta_info return_progress return_spec_tokens_details return_weight_versions rid route routed_dp_rank"
    " session_id speculation speculative.n_max speculative.n_min speculative.ngram_min_hits speculative.ngram_size_m"
    " speculative.ngram_size_n speculative.p_min speculative.type sse_ping_interval stop_server_tools_when"
    " stream_interval stream_reasoning timings_per_token trace usage user_profile_id user_security_context verbose"
    " workspace_id anthropic_beta anthropic_version incremental_output tool_stream _debug_render_only truncation_length"
    # How a server computes, and what it does where a context is longer than its memory, which here is a 400.
    " backend_sampling embedding_only f16_kv logits_all low_vram main_gpu n_discard n_keep num_batch num_ctx num_gpu"
    " num_keep num_thread numa use_mlock use_mmap vocab_only"
    # What says more of a parameter that is refused, or of media, of which there are none.
    " adaptive_decay dry_allowed_length dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent"
    " grammar_type height image_config images_config max_dynamic_patch media_io_kwargs min_dynamic_patch mirostat_eta"
    " mirostat_lr mirostat_tau mm_payload mm_processor_kwargs reasoning_budget_end_tag reasoning_budget_end_tags"
    " reasoning_budget_start_tag routed_experts_prompt_start routed_experts_start_len steps"
    " truncation_side use_audio_in_video video_config vl_high_resolution_images width xtc_threshold"
)

_GENERATION: Table = {
    **_EXECUTION,
    "service_tier": Parameter(("auto", "default")),
    "verbosity": Parameter(("medium",)),
    # Other names
    **_same("max_tokens", "max_new_tokens max_tokens_to_sample", n_predict=(-1,), num_predict=(-1, -2)),
    **_same("min_tokens", min_new_tokens=(0,)),
    **_same("n", "n_cmpl num_return_sequences"),
    **_same("seed", "random_seed"),
    **_same("stop", stop_sequences=([],)),
    **_same("include_stop_str_in_output", no_stop_trim=(False,)),
    **_same("guided_json", json_schema=("",)),
    **_same("guided_grammar", grammar=("",), grammar_string=("",)),
    # The length
    **_refused("use {limit}", "max_output_tokens", auto_max_new_tokens=(False,)),
    **_refused("use the header x-request-timeout", t_max_predict_ms=(-1, 0), t_max_prompt_ms=(-1, 0)),
    **_refused(
        _NO_BUDGET, reasoning_budget=(-1,), reasoning_budget_tokens=(-1,), thinking_budget=(-1,),
        thinking_budget_tokens=(-1,), thinking_token_budget=(-1,),
    ),
    **_refused(_NO_BUDGET, reasoning_budget_message=("",), reasoning_control=(False,), max_reasoning_tokens=()),
    **_refused("shorten the prompt; /tokenize counts its tokens", "prompt_truncate_len truncate_prompt_tokens"),
    **_refused("shorten the prompt; one that is too long is an error", context_length_exceeded_behavior=("error",)),
    **_refused("shorten the prompt; one that is too long is an error", transforms=([],)),
    **_refused("use background", deferred=(False,)),
    # How tokens are drawn
    **_refused("set temperature to 0", do_sample=(True,)),
    **_refused(
        _SAMPLERS, dynatemp_range=(0,), min_keep=(0,), mirostat=(0,), mirostat_mode=(0,), tfs=(1,), tfs_z=(1,),
        top_a=(0,), top_n_sigma=(0, -1), typical=(0, 1), typical_p=(0, 1), xtc_probability=(0,), samplers=(),
        mirostat_target=(), adaptive_target=(-1,), epsilon_cutoff=(0,), eta_cutoff=(0,), smoothing_factor=(0,),
        smoothing_curve=(1,), skew=(0,), penalty_alpha=(0,), sampler_seq=([],), sampler_order=([],),
        sampler_priority=([],), temperature_last=(False,), dynamic_temperature=(False,), guidance_scale=(1,),
        negative_prompt=("",),
    ),
    **_refused(
        _REPETITION, dry_multiplier=(0,), no_repeat_ngram_size=(0,), encoder_repetition_penalty=(1,),
        penalize_newline=(True,), repetition_detection=({},), encoder_no_repeat_ngram_size=(0,),
    ),
    **_refused("use repetition_penalty", repeat_penalty=(1,), rep_pen=(1,)),
    **_refused("repetition_penalty covers the whole text; leave it out", repeat_last_n=(-1,),
               repetition_penalty_range=(0, -1)),
    **_refused("use {beam}", num_beams=(1,)),
    **_refused("use {tokens}", "allowed_token_ids"),
    **_refused("use logit_bias or bad_words", "custom_logit_processor", logits_processors=([],), custom_params=({},)),
    **_refused("use logit_bias or bad_words", ban_eos_token=(False,), custom_token_bans=("",), bad_words_ids=([],)),
    **_refused("vLLM's extensions are not supported; leave it out", vllm_xargs=({},)),
    **_refused("there is no watermarking; leave it out", watermark=({}, False), watermarking=(False,)),
    **_refused("use {stop}, or {grammar} for the whole output", stop_regex=([], "")),
    **_refused("use {stop} and {limit}", n_indent=(0,)),
    # What the output must look like
    **_refused("use {form}", format=("",)),
    **_refused("use {regex}", guided_whitespace_pattern=()),
    **_refused("use {tools} with strict set to true, or {grammar}", "structural_tag"),
    **_refused("a grammar applies from the first token; use {grammar}", grammar_lazy=(False,), grammar_triggers=([],)),
    **_refused("use {tools}", functions=([],)),
    **_refused("use {tool_choice}", function_call=("none", "auto")),
    **_refused("calls are always parsed; leave it out", parse_tool_calls=(True,), disable_tool_validation=(False,)),
    **_refused("the server detects it; leave it out", "chat_format chat_parser message_delimiters"),
    # What the answer holds
    **_refused(
        _SHOWN, return_flat_raw_output_top_logprobs=(False,), return_flat_raw_top_logprobs_b64=(False,),
        return_hidden_states=(False,), return_mm_kwargs=(False,), return_routed_experts=(False,),
        return_sampling_mask=(False,), return_token_offsets=(False,), post_sampling_probs=(False,),
        sampling_logprobs_mode=(), logprob_token_ids=([],), top_prompt_logprobs=(0,),
    ),
    **_refused("use {logprobs}", n_probs=(0,)),
    **_refused(
        "use {token_ids}", return_tokens=(False,), return_prompt_token_ids=(False,),
        return_input_ids_in_sglext=(False,), return_output_ids_in_sglext=(False,),
    ),
    **_refused("use /tokenize with return_token_strs", return_prompt_text=(False,)),
    **_refused("use {special}", preserved_tokens=([],), raw_output=(False,)),
    **_refused("leave it out", spaces_between_special_tokens=(True,)),
    **_refused("use /v1/completions with echo", echo=(False,), echo_last=(0,)),
    **_refused(_MEDIA, "audio audio_config enhancements", modalities=(["text"],), images=([],), image_data=([],)),
    # What the model reads
    **_refused("use {input}", "input input_ids prompt_embeds"),
    **_refused("write it into {system}", "context instructions task",
               documents=([],), system=("",), safe_prompt=(False,)),
    **_refused(_TEMPLATE, "chat_template template custom_chat_template instruction_template mode"),
    **_refused(RENDERED, continue_final_message=(False,), generation_prompt=("",), raw=(False,)),
    **_refused("write it into {input}", input_prefix=("",), input_suffix=("",), input_extra=([],)),
    **_refused("send the whole conversation in {input}", "cached_content", session_params=({},)),
    **_refused("remove special tokens from {input}", safe_tokenization=(False,)),
    **_refused("the chat template decides which reasoning it shows; send only the reasoning that it may show",
               reasoning_history=(), preserve_thinking=(), clear_thinking=()),
    **_refused("write a call's result into {input}", deferred_tools=()),
    # Adapters, and what others run on their servers
    **_refused("give the adapter's name as the model", "lora_path lora_request", lora=([],), adapter_id=(), lora_id=()),
    **_refused("move its fields to the top level, under the names of this API", options=({},), extra_body=({},),
               parameters=({},)),
    **_refused(_SERVER_TOOLS, "web_search_options compound_custom search_settings search_parameters include_domains"
               " exclude_domains citation_options data_sources mcp_servers search_options search_domain_filter"
               " search_recency_filter search_mode return_images return_related_questions",
               plugins=([],), enable_search=(False,),
               disable_search=(True,), google=({},)),
    **_refused(_MODERATION, "moderation safety_model guardrails safety_settings safety_mode",
               mask_sensitive_info=(False,)),
    **_refused("use {effort}", prompt_mode=()),
}  # fmt: skip


def in_words(table: Table, words: Mapping[str, str], shared: Container[str] | None = None) -> Table:
    """Returns the table in the words of one API. With ``shared``, the fields that it has in common with chats, it is
    without other names of fields that the API lacks.
    """
    return {
        name: replace(each, instead=each.instead and each.instead.format_map(words))
        for name, each in table.items()
        if each.same_as is None or shared is None or each.same_as in shared
    }


def counting(table: Table, fields: Iterable[str]) -> Table:
    """Returns the table of a request that only counts the tokens of a prompt: ``fields`` of the request that would be
    answered do not change them, under whatever name.
    """
    ignored = {name for name, each in table.items() if each.same_as} | set(fields)
    return {**table, **dict.fromkeys(sorted(ignored), Parameter())}


def named(table: Table, field: str, default: Any = ...) -> Any:
    """Returns the field of a request that has other names elsewhere, and that cannot be checked without its value."""
    others = (name for name, each in table.items() if each.same_as == field)
    return Field(default, validation_alias=AliasChoices(field, *others))


_CHAT_WORDS: Final = {
    "limit": "max_tokens",
    "form": "response_format or structured_outputs",
    "regex": "guided_regex or guided_grammar",
    "grammar": "guided_grammar",
    "tokens": "guided_choice, guided_regex or logit_bias",
    "stop": "stop",
    "logprobs": "logprobs and top_logprobs",
    "token_ids": "return_token_ids",
    "special": "skip_special_tokens",
    "beam": "beam_width",
    "tools": "tools",
    "tool_choice": "tool_choice",
    "input": "messages",
    "system": "a message of the role system",
    "effort": "reasoning_effort",
}
_COMPLETION_WORDS: Final = {
    **_CHAT_WORDS,
    "logprobs": "logprobs",
    "tools": "/v1/chat/completions with tools",
    "tool_choice": "/v1/chat/completions with tool_choice",
    "input": "prompt",
    "system": "prompt",
    "effort": "/v1/chat/completions with reasoning_effort",
}
_OTHERS: Final = {
    **_CHAT_WORDS,
    "tokens": "logit_bias",
    "token_ids": "/v1/chat/completions with return_token_ids",
    "special": "/v1/chat/completions with skip_special_tokens",
    "beam": "/v1/chat/completions with beam_width",
}
_RESPONSES_WORDS: Final = {
    **_OTHERS,
    **dict.fromkeys(("form", "regex", "grammar"), "text.format"),
    "limit": "max_output_tokens",
    "logprobs": "top_logprobs",
    "input": "input",
    "system": "instructions",
    "effort": "reasoning.effort",
}
_MESSAGES_WORDS: Final = {
    **_OTHERS,
    **dict.fromkeys(("form", "regex", "grammar"), "output_config.format"),
    "stop": "stop_sequences",
    "logprobs": "/v1/chat/completions with logprobs",
    "system": "system",
    "effort": "output_config.effort",
}

_THINKING = Parameter(({"type": "adaptive"}, {"type": "auto"}), None, "chat_template_kwargs", _thinking_switch)

CHAT: Final[Table] = {
    **in_words(_GENERATION, _CHAT_WORDS),
    **dict.fromkeys(("thinking", "think", "enable_thinking"), _THINKING),
    "reasoning": Parameter(({},), None, "reasoning_effort", _effort),
    **_refused("use separate_reasoning or include_reasoning", reasoning_format=("auto", "deepseek", "parsed"),
               reasoning_split=(True,)),
    **_refused(RENDERED, add_generation_prompt=(True,)),
    **_refused("the chat template writes them", add_special_tokens=(False,)),
    **_refused("use /v1/completions", echo=(False,), suffix=("",)),
    **_refused("use messages or, for completions, /v1/completions", prompt=("",)),
    "cache_control": Parameter(),
}  # fmt: skip
"""The names that mean something to other servers in ``/v1/chat/completions``."""

COMPLETIONS: Final[Table] = {
    **in_words(_GENERATION, _COMPLETION_WORDS),
    **_same("max_tokens", "max_completion_tokens"),
    **_same("logprobs", n_probs=(0,)),
    **_refused("use the token ids that /tokenize makes as prompt", add_special_tokens=(True,)),
    **_refused("write it into the prompt with the model's own fill-in-the-middle tokens", suffix=("",)),
    **_refused("use logprobs", top_logprobs=(0,)),
    **_refused(_CHAT, messages=([],), tool_choice=("none", "auto"), tools=([],), parallel_tool_calls=(True, False)),
    # There is no template, and the text is the whole answer.
    **_ignored("chat_template_kwargs enable_thinking include_reasoning reasoning reasoning_effort reasoning_format"
               " separate_reasoning think thinking"),
}  # fmt: skip

RESPONSES: Final[Table] = {
    **in_words(_GENERATION, _RESPONSES_WORDS, {"seed", "min_tokens", "stop"}),
    **_ignored("access_programs guided_decoding_backend image"),
    **_refused("use max_output_tokens", "max_completion_tokens max_tokens"),
    **_refused("use input", messages=([],)),
    **_refused("write it into input", "previous_input_messages"),
    **_refused("use reasoning.effort or chat_template_kwargs", "reasoning_effort reasoning_format thinking think"
               " enable_thinking"),
    **_refused("use text.format", "response_format"),
    **_refused("use text.format", "structured_outputs guided_json guided_regex guided_choice guided_grammar regex"
               " ebnf"),
    **_refused("use /tokenize", enable_response_messages=(False,)),
    **_refused("prompts are not stored; write its text into instructions or input", "prompt"),
    **_refused("write it into instructions", "personality"),
    "context_management": Parameter(([],)),
}  # fmt: skip

MESSAGES: Final[Table] = {
    **in_words(_GENERATION, _MESSAGES_WORDS, {"seed", "min_tokens"}),
    **_ignored("user safety_identifier prompt_cache_key guided_decoding_backend stream_options diagnostics"
               " fallback_credit_token"),
    **_refused("use max_tokens", "max_completion_tokens"),
    **_refused("use tool_choice.disable_parallel_tool_use", parallel_tool_calls=(True,)),
    **_refused("use messages", prompt=("",)),
    **_refused("use output_config.effort or thinking", "reasoning_effort reasoning reasoning_format think"
               " enable_thinking chat_template_kwargs"),
    **_refused("use output_config.format", "response_format structured_outputs guided_json guided_regex guided_choice"
               " guided_grammar regex ebnf"),
    **_refused("use stop_sequences", stop=([],)),
    **_refused("ask for a summary in a message", "compaction"),
    **_refused("no tool runs on this server; leave it out", "container"),
    **_refused("call them yourself, and offer what they have as tools", mcp_servers=([],)),
    **_refused("send the whole conversation in messages", "thread"),
    "context_management": Parameter(({"edits": []},)),
    "fallbacks": Parameter(([],)),
    "service_tier": Parameter(("auto", "standard_only")),
    "speed": Parameter(("standard",)),
}  # fmt: skip

# Objects in a request

STREAM_OPTIONS: Final[Table] = {"include_obfuscation": Parameter((False,))}
RESPONSE_FORMAT: Final[Table] = {
    **_refused("use structured_outputs.grammar or structured_outputs.regex", "grammar pattern"),
    **_refused(
        "use tools with strict set to true, or guided_grammar", "structures triggers format at_least_one begin end"
    ),
}
STRUCTURED_OUTPUTS: Final[Table] = {
    **_refused("set additionalProperties to false in the schema", disable_additional_properties=(False,)),
    **_refused("JSON has at most one line break between two tokens; leave it out", disable_any_whitespace=(False,)),
    **_refused("use tools with strict set to true, or grammar", "structural_tag"),
    **_refused("use regex or grammar", "whitespace_pattern"),
    "disable_fallback": Parameter((False, True)),
}
TOOL: Final[Table] = {"defer_loading": Parameter((False,))}
FUNCTION: Final[Table] = {"defer_loading": Parameter((False,)), "output_schema": Parameter(), "response": Parameter()}
RESPONSES_TOOL: Final[Table] = {
    "allowed_callers": Parameter((["direct"],), "the model calls functions directly"),
    "async": Parameter((False,)),
    "defer_loading": Parameter((False,)),
    "output_schema": Parameter(),
}
RESPONSES_TEXT: Final[Table] = {"verbosity": Parameter(("medium",))}
RESPONSES_REASONING: Final[Table] = {
    "context": Parameter(("auto",)),
    **_refused("use effort", mode=("standard",)),
    **_refused("thinking has no budget; use max_output_tokens", "max_tokens budget_tokens"),
    **_refused("use effort", enabled=(True,), exclude=(False,)),
}
MESSAGES_TOOL: Final[Table] = {
    "allowed_callers": Parameter((["direct"],), "the model calls tools directly"),
    "defer_loading": Parameter((False,)),
    "eager_input_streaming": Parameter((False, True)),  # arguments are streamed as they come
    "input_examples": Parameter(([],)),
}
# Budgets are hints there, which all clients send.
MESSAGES_THINKING: Final[Table] = _ignored("block_binding budget_tokens")
MESSAGES_OUTPUT: Final[Table] = _ignored("task_budget")

# What is pooled

_ACTIVATION = "use use_activation"
_TRUNCATE = Parameter((False, "NONE"), None, "truncate_prompt_tokens", _whole_length)
_POOLED: Table = {
    **_ignored("cache_salt request_id rid keep_alive media_io_kwargs metadata debug models provider"),
    **_refused(_ACTIVATION, "activation normalize normalized softmax apply_softmax", embd_normalize=(2,)),
    **_refused(_TEMPLATE, "chat_template", chat_template_kwargs=({},)),
    **_refused("send texts", messages=([],), images=([],), mm_processor_kwargs=({},), embed_overrides=([],),
               embed_override_token_id=()),
    **_refused("prompts are not padded; leave it out", padding=("do_not_pad",)),
    **_refused("give the adapter's name as the model", lora_path=(), lora=([],)),
    **_refused("move its fields to the top level, under the names of this API", options=({},)),
    **_refused("leave it out", "dimension_reduction task late_chunking"),
    **dict.fromkeys(("truncate", "truncation"), _TRUNCATE),
    **_refused("texts are cut at their end", truncation_direction=("Right", "right"), truncation_side=("right",)),
}  # fmt: skip
EMBEDDINGS: Final[Table] = {
    **_POOLED,
    **_same("dimensions", "output_dimension output_dimensionality"),
    **_same("input", "inputs texts"),
    **_refused("embeddings are float32", embed_dtype=("float32",), output_dtype=("float",)),
    **_refused("base64 holds little-endian numbers", endianness=("native", "little")),
    **_refused("use prompt_name", "input_type instruction instruct prompt_type"),
    **_refused("use encoding_format", embedding_types=(["float"],), embedding_type=("float",)),
    **_refused("write the prompt as input", add_generation_prompt=(False,),
               continue_final_message=(False,), content=()),
}  # fmt: skip
_SCORED: Table = {
    **_POOLED,
    **_refused("write it into the query", "instruction instruct"),
    **_refused("use truncate_prompt_tokens", "max_tokens_per_doc max_tokens_per_query max_doc_length",
               max_chunks_per_doc=(1,)),
    **_refused("use /v1/completions with logprobs", "label_token_ids score_extraction_token temperature",
               item_first=(False,), return_token_logprobs=(False,), return_pooled_hidden_states=(False,)),
    **_refused("send texts", "query_embed_overrides item_embed_overrides"),
}  # fmt: skip
SCORE: Final[Table] = {
    **_SCORED,
    **_same("text_1", "queries query data_1"),
    **_same("text_2", "documents items data_2"),
    **_ignored("encoding_format"),
}
RERANK: Final[Table] = {
    **_SCORED,
    **_same("documents", "texts"),
    **_same("return_documents", "return_text"),
    **_same("top_n", "top_k"),
    **_ignored("relevant_spans raw_scores"),
    **_refused("documents are texts, or objects with a text", rank_fields=(["text"],)),
}

# Tokens of texts

TOKENIZE: Final[Table] = {
    **_ignored("media_io_kwargs mm_processor_kwargs"),
    **_refused(_TEMPLATE, "chat_template"),
    **_refused("leave the last message out and add its text to the prompt", continue_final_message=(False,)),
    **_refused("leave tools out where none may be called", tool_choice=("auto", "required")),
    **_same("prompt", "content text"),
    **_same("add_special_tokens", "add_special"),
    **_same("return_token_strs", "with_pieces"),
    **_refused("marks of the model are always parsed; leave it out", parse_special=(True,)),
}
DETOKENIZE: Final[Table] = _refused("special tokens are part of the text; leave it out", skip_special_tokens=(False,))

# Adapters

LOAD_LORA: Final[Table] = {
    **_refused("unload the adapter first", load_inplace=(False,)),
    **_refused("save the adapter with one matrix for each layer", is_3d_lora_weight=(False,)),
}
UNLOAD_LORA: Final[Table] = _ignored("lora_int_id")

"""Names of spans, attributes and metrics, in one table, so that dashboards, alerts and both services agree.

Attributes that describe a model call follow OpenTelemetry's GenAI conventions; all others begin with ``quire.``.
"""

from enum import StrEnum


class Span:
    """Names of spans. A router's attempt is called after its operation and model, such as ``chat quire-demo``."""

    ADMIT = "quire.admit"
    ROUTE = "quire.route"
    QUEUE = "quire.queue"
    WAIT = "quire.engine.wait"
    PREFILL = "quire.engine.prefill"
    DECODE = "quire.engine.decode"
    SWAP_OUT = "quire.engine.swap_out"
    SWAP_IN = "quire.engine.swap_in"
    STEP = "quire.engine.step"
    STEP_SCHEDULE = "schedule"
    STEP_SWAP = "swap"
    STEP_FORWARD = "forward"
    STEP_SAMPLE = "sample"
    STEP_EMIT = "emit"


class Event:
    """Names of span events."""

    FIRST_TOKEN = "quire.first_token"  # noqa: S105 - the name of an event
    PREEMPTED = "quire.preempted"
    RESUMED = "quire.resumed"


class Attribute:
    """Names of span attributes."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE = "gen_ai.request.temperature"
    REQUEST_TOP_P = "gen_ai.request.top_p"
    REQUEST_TOP_K = "gen_ai.request.top_k"
    REQUEST_STREAM = "gen_ai.request.stream"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    ERROR_TYPE = "error.type"
    SERVER_ADDRESS = "server.address"
    ZONE = "cloud.availability_zone"
    REQUEST_ID = "quire.request.id"
    CLIENT_REQUEST_ID = "quire.client.request_id"
    ATTEMPT = "quire.attempt"
    POLICY = "quire.route.policy"
    CANDIDATES = "quire.route.candidates"
    ENGINE = "quire.route.engine"
    QUEUE_REASON = "quire.queue.reason"
    STEP_ID = "quire.step.id"
    STEP_PREFILL = "quire.step.num_prefill"
    STEP_DECODE = "quire.step.num_decode"
    STEP_TOKENS = "quire.step.tokens"
    STEP_PREEMPTED = "quire.step.preempted"
    STEP_PAUSE_SECONDS = "quire.step.pause_seconds"
    STEP_SCHEDULE_SECONDS = "quire.step.schedule_seconds"
    STEP_SWAP_SECONDS = "quire.step.swap_seconds"
    STEP_FORWARD_SECONDS = "quire.step.forward_seconds"
    STEP_SAMPLE_SECONDS = "quire.step.sample_seconds"
    STEP_EMIT_SECONDS = "quire.step.emit_seconds"
    BLOCKS_FREE = "quire.step.kv_free_blocks"
    BLOCKS_TOTAL = "quire.step.kv_total_blocks"
    BLOCKS = "quire.blocks"
    PREEMPTION = "quire.preemption"
    PREEMPTION_REASON = "quire.preemption.reason"
    PREEMPTIONS = "quire.preemption.count"
    AWAY_SECONDS = "quire.preemption.away_seconds"
    CHOICE = "quire.choice"
    FIRST_STEP = "quire.step.first"
    LAST_STEP = "quire.step.last"


class DropReason(StrEnum):
    """Why a span that was to be exported was not: its queue was full, the collector did not take it, or there were more
    steps to trace than the rate allows.
    """

    QUEUE_FULL = "queue_full"
    EXPORT_FAILED = "export_failed"
    RATE = "rate"


PROVIDER_NAME = "quire"


class Metric:
    """Names of Prometheus metrics. Labels are configured model names and enumerations only."""

    REQUESTS = "quire_requests"
    REJECTIONS = "quire_rejections"
    IN_FLIGHT = "quire_in_flight_requests"
    PARKED = "quire_parked_requests"
    LOAD = "quire_load"
    QUEUE_SECONDS = "quire_queue_seconds"
    ADMISSION_REFUSALS = "quire_admission_refusals"
    LIMITS_SHARED = "quire_limits_shared"
    TIME_TO_FIRST_TOKEN = "quire_time_to_first_token_seconds"  # noqa: S105 - the name of a metric
    INTER_TOKEN_LATENCY = "quire_inter_token_latency_seconds"  # noqa: S105 - the name of a metric
    REQUEST_DURATION = "quire_request_duration_seconds"
    PROMPT_TOKENS = "quire_prompt_tokens"
    GENERATION_TOKENS = "quire_generation_tokens"
    ATTEMPTS_LOST = "quire_attempts_lost"
    ENGINES_READY = "quire_engines_ready"
    DISCOVERY_ENGINES = "quire_discovery_engines"
    DISCOVERY_CONNECTED = "quire_discovery_connected"
    DISCOVERY_HEARD = "quire_discovery_heard_timestamp_seconds"
    LOAD_SHARED = "quire_load_shared"
    LOAD_ROUTERS = "quire_load_routers"
    LOAD_SHARES_IGNORED = "quire_load_shares_ignored"
    ROUTE_DECISIONS = "quire_route_decisions"
    INDEX_BLOCKS = "quire_index_blocks"
    INDEX_DROPPED = "quire_index_dropped_blocks"
    JOURNAL_AVAILABLE = "quire_journal_available"
    JOURNAL_PENDING = "quire_journal_pending_requests"
    JOURNAL_DROPPED = "quire_journal_dropped_writes"
    STALE_EPOCHS = "quire_stale_epoch_rejections"
    TASK_RESTARTS = "quire_router_task_restarts"
    ENGINE_RUNNING = "quire_engine_running_sequences"
    ENGINE_WAITING = "quire_engine_waiting_sequences"
    ENGINE_SWAPPED = "quire_engine_swapped_sequences"
    ENGINE_BLOCKS_TOTAL = "quire_engine_blocks"
    ENGINE_BLOCKS_FREE = "quire_engine_free_blocks"
    ENGINE_STEP_SECONDS = "quire_engine_step_seconds"
    ENGINE_BOUNDED_STEP_RATIO = "quire_engine_bounded_step_ratio"
    ENGINE_COMPUTED_TOKENS = "quire_engine_computed_tokens"
    ENGINE_GENERATION_TOKENS = "quire_engine_generation_tokens"
    ENGINE_PREEMPTIONS = "quire_engine_preemptions"
    ENGINE_AWAY_SECONDS = "quire_engine_away_seconds"
    ENGINE_SWAP_BLOCKS = "quire_engine_swapped_blocks"
    ENGINE_USED_AHEAD_BLOCKS = "quire_engine_used_ahead_blocks"
    ENGINE_PREFIX_QUERIES = "quire_engine_prefix_query_tokens"
    ENGINE_PREFIX_HITS = "quire_engine_prefix_hit_tokens"
    ENGINE_DISK_BLOCKS = "quire_engine_kv_disk_blocks"
    ENGINE_DISK_BYTES = "quire_engine_kv_disk_bytes"
    ENGINE_DISK_FAILURES = "quire_engine_kv_disk_failures"
    ENGINE_DRAFTS = "quire_engine_drafts"
    ENGINE_DRAFT_TOKENS = "quire_engine_draft_tokens"
    ENGINE_ACCEPTED_TOKENS = "quire_engine_accepted_draft_tokens"
    ENGINE_OUT_OF_MEMORY = "quire_engine_out_of_memory_requests"
    ENGINE_PARTED_BLOCKS = "quire_engine_parted_blocks"
    ENGINE_EMPTY_SLOTS = "quire_engine_empty_slots"
    ENGINE_UNREACHABLE_BLOCKS = "quire_engine_unreachable_blocks"
    ENGINE_DROPPED_SPANS = "quire_engine_dropped_spans"
    ENGINE_TASK_RESTARTS = "quire_engine_task_restarts"
    ENGINE_GRAMMARS = "quire_engine_grammars"
    ENGINE_GRAMMAR_SECONDS = "quire_engine_grammar_compile_seconds"
    ENGINE_LORAS = "quire_engine_loras"
    ENGINE_LORA_SLOTS = "quire_engine_lora_slots"
    ENGINE_USED_LORA_SLOTS = "quire_engine_used_lora_slots"
    ENGINE_LORA_WAITING = "quire_engine_lora_waiting_sequences"
    ENGINE_HEARTBEAT_AGE = "quire_engine_heartbeat_age_seconds"

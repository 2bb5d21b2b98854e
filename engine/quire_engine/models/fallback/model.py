"""A causal language model of transformers as a ``Model``. It knows transformers' classes, and no sequences."""

from typing import Any

import torch

from quire_engine.attention.base import AttentionBackend
from quire_engine.models.config import AttentionLayout
from quire_engine.models.errors import ModelError
from quire_engine.models.fallback.attention import (
    PAGED_ATTENTION,
    PROBE_ATTENTION,
    AttentionProbe,
    AttentionRequirements,
    PagedAttentionContext,
)

NUM_PROBE_TOKENS = 3


class TransformersModel:
    """An unmodified causal language model. A ``Model``.

    ``causal`` is the model with its weights, and belongs to this object from now on. Its two parts are called apart:
    the body for all tokens, the head for those whose logits are asked for. Raises ``ModelError`` for an attention that
    no backend can do.
    """

    capturable = False

    def __init__(self, causal: Any) -> None:
        self._causal = causal
        self._decoder: Any = causal.base_model.get_decoder()
        if self._decoder is causal:
            raise ModelError("It is not divided into a body and a head.")
        needs = self._probe()
        self.layout = _common_layout(needs)
        self.dtype = needs[0].dtype
        self._sliding_windows = tuple(each.window for each in needs)
        self._output_class: Any = None
        given = torch.nn.Module()
        given.forward = self._pass_through
        causal.set_submodule(next(name for name, part in causal.named_modules() if part is self._decoder), given)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kv: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """See ``Model.forward``."""
        output = self._run_decoder(
            token_ids, positions, quire_step=PagedAttentionContext(kv, attention, self._sliding_windows)
        )
        self._output_class = type(output)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Model.logits``."""
        logits: torch.Tensor = self._causal(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def _pass_through(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> Any:
        """Stands where the body was, for the head to call: the states are there already.

        So the scales, caps and biases that a model puts around its head are computed by its own code.
        """
        return self._output_class(last_hidden_state=inputs_embeds)

    def _run_decoder(self, token_ids: torch.Tensor, positions: torch.Tensor, **context: object) -> Any:
        return self._decoder(
            input_ids=token_ids[None].long(), position_ids=positions[None].long(), use_cache=False, **context
        )

    def _probe(self) -> list[AttentionRequirements]:
        """What each layer asks of its attention, in the order of the layers."""
        probe, places = AttentionProbe(), torch.arange(NUM_PROBE_TOKENS, device=self._causal.device)
        self._causal.set_attn_implementation(PROBE_ATTENTION)
        self._run_decoder(places, places, quire_probe=probe)
        self._causal.set_attn_implementation(PAGED_ATTENTION)
        return probe.requirements


def _common_layout(needs: list[AttentionRequirements]) -> AttentionLayout:
    """The one layout that all layers have."""
    if not needs or [each.layer for each in needs] != list(range(len(needs))):
        raise ModelError("Not every layer has exactly one attention.")
    first, *others = [(one.num_heads, one.num_kv_heads, one.head_dim, one.scale, one.dtype) for one in needs]
    if any(other != first for other in others):
        raise ModelError("Its layers differ in heads, sizes or scales, which KV blocks and backends cannot hold.")
    layout = AttentionLayout(len(needs), *first[:-1])
    if layout.num_heads % layout.num_kv_heads:
        raise ModelError(f"Its {layout.num_heads} heads cannot share {layout.num_kv_heads} KV heads evenly.")
    return layout

"""The layers that models share: linear, norm, rotary embedding, MLP and mixture of experts."""

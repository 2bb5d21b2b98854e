"""The layers that decoders share (linear, norm, feed-forward, rotary embedding) and the loading of their weights."""

"""What all rooms that compute with tensors know of a device that works beside the host."""

"""Request bodies as pydantic models: OpenAI's fields, messages and tools."""

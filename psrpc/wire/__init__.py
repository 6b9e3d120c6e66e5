"""How values become messages: the codec of tensors, bounds of fields, errors as gRPC status."""

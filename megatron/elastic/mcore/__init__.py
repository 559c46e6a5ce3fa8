"""The adapter to Megatron, the only folder that imports it: patches, model units, arguments, checkpoint keys."""

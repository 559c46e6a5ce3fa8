"""The only folder that touches Megatron: patches, model surgery, arguments, checkpoint keys."""

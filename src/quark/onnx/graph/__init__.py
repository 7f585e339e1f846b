"""The graph layer of the ONNX flow: read, lift, edit and write models. Raw protobuf stays in here."""

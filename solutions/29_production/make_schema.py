"""Makes triton_model_config.json, the field table that the chapter reads, from Triton's own published schema.

    python make_schema.py MODEL_CONFIG_PB2.py > triton_model_config.json

MODEL_CONFIG_PB2.py: tritonclient/grpc/model_config_pb2.py of the PyPI wheel tritonclient 2.73.0, which is what protoc makes
of protobuf/model_config.proto in github.com/triton-inference-server/common. Needs the package protobuf, 6.33 or newer.
"""

import importlib.util
import json
import sys

SOURCE = "protobuf/model_config.proto, github.com/triton-inference-server/common, as published in tritonclient 2.73.0 (NVIDIA, BSD-3-Clause)"
SCALARS = {1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 8: "bool", 9: "string", 13: "uint32"}


def name_of(descriptor):
    """The name without the package: ModelOptimizationPolicy.Cuda.GraphSpec."""
    return descriptor.full_name.partition(".")[2]


def type_of(field):
    if field.message_type is not None:
        return name_of(field.message_type)
    return name_of(field.enum_type) if field.enum_type is not None else SCALARS[field.type]


def main(path):
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    messages, enums, waiting = {}, {}, [module.ModelConfig.DESCRIPTOR]
    while waiting:
        message = waiting.pop()
        if name_of(message) in messages:
            continue
        fields = messages[name_of(message)] = {}
        for field in message.fields:
            told = fields[field.name] = {"type": type_of(field)}
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
                told |= {"type": type_of(value), "map_key": type_of(key)}
                field = value
            elif field.is_repeated:
                told["repeated"] = True
            if field.containing_oneof is not None and "map_key" not in told:
                told["oneof"] = field.containing_oneof.name
            if field.message_type is not None:
                waiting.append(field.message_type)
            elif field.enum_type is not None:
                enums[name_of(field.enum_type)] = [value.name for value in field.enum_type.values]
    order = {"source": SOURCE, "root": "ModelConfig", "messages": dict(sorted(messages.items())), "enums": dict(sorted(enums.items()))}
    json.dump(order, sys.stdout, indent=1)
    print()


main(sys.argv[1])

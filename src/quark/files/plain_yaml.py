"""YAML from people who are not trusted, read by PyYAML; a file of its own because few commands read any."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class Plain(yaml.SafeLoader):
    """YAML without aliases and tags; a key that is given twice is an error: the second line would silently win."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node that is written where it stands, of the type that it looks like."""
        event: Any = self.peek_event()
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"line {event.start_mark.line + 1}: aliases (*{event.anchor}) are not read")
        if getattr(event, "tag", None):
            raise yaml.YAMLError(f"line {event.start_mark.line + 1}: tags ({event.tag}) are not read")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are all different."""
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: a key must be a word or a number")
            if key in seen:
                raise yaml.YAMLError(f"the key {key!r} is given twice (line {node.start_mark.line + 1} and below)")
            seen.add(key)
        return super().construct_mapping(node, deep)

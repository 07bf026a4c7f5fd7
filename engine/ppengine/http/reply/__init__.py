"""From the text of an output to reasoning, content and tool calls, as the text grows."""

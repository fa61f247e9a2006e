"""Chat ↔ tokens: how messages become ids, and where a sampled turn ends.

`TemplateRenderer` works for any Jinja chat template that puts message content into the text unchanged. It renders
the template once with a placeholder for each content, encodes the template's own text with control tokens
enabled, and encodes every content with control tokens disabled. So no content can become a control
token, whatever it says, and the ids of a history are never made again: a bridge appends to what was sampled.
"""

"""Files that last: durable and atomic writes, locks, strict JSON, and safetensors headers, readers and writers."""

"""What every headrace service shares: the wire format, the subjects, the broker, the settings."""

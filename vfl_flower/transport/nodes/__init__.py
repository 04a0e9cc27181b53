"""Guards of a SuperLink and of streams: certificates, and limits for strangers."""

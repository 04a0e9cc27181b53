"""What guards a SuperLink and the streams: certificates, and limits for strangers."""

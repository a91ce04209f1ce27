//! Every flag and environment variable, in one table.

/// How a value is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// Text; a variable that is set but empty counts.
    Text,
    /// Go's boolean words.
    Bool,
    /// A whole number.
    Int,
    /// A port number: checked to be 0–65536 where it comes from the environment, as the reference does.
    Port,
    /// Go's durations.
    Duration,
    /// Comma-separated.
    List,
}

/// What a flag means to this version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Support {
    /// It does what it says.
    Built,
    /// Its feature comes later, and without it the principal would be less secure or synchronise something else:
    /// any value but a neutral one refuses the start.
    Refused(&'static str),
    /// Its feature comes later and its absence shows by itself: a value that is not neutral gives one line of warning.
    Warned(&'static str),
}

/// One option.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// Long name, without dashes.
    pub name: &'static str,
    /// Environment variable, if there is one.
    pub env: &'static str,
    /// How it is read.
    pub shape: Shape,
    /// Built-in default, as text.
    pub default: &'static str,
    /// Other values that ask for nothing, for example those of the installed ConfigMaps.
    pub neutral: &'static [&'static str],
    /// What it means to this version.
    pub support: Support,
    /// For `--help`.
    pub help: &'static str,
}

const fn flag(
    name: &'static str,
    env: &'static str,
    shape: Shape,
    default: &'static str,
    support: Support,
    help: &'static str,
) -> Flag {
    Flag { name, env, shape, default, neutral: &[], support, help }
}

const fn shipped(mut base: Flag, neutral: &'static [&'static str]) -> Flag {
    base.neutral = neutral;
    base
}

use Shape::{Bool, Duration, Int, List, Port, Text};
use Support::{Built, Refused, Warned};

const RESOURCE_PROXY: Support = Warned("the resource proxy is not part of this version");
const REDIS: Support = Warned("the Redis proxy and cluster information are not part of this version");
const AUTONOMOUS: Support = Warned("autonomous agents are not part of this version");
const HA: Support = Warned("high availability is not part of this version");
const TRACING: Support = Warned("tracing is not part of this version");

/// All flags, grouped as in the reference's documentation.
pub const FLAGS: &[Flag] = &[
    // Server, namespaces, mapping.
    flag(
        "listen-host",
        "ARGOCD_PRINCIPAL_LISTEN_HOST",
        Text,
        "",
        Built,
        "Host to listen on; empty: all interfaces",
    ),
    flag(
        "listen-port",
        "ARGOCD_PRINCIPAL_LISTEN_PORT",
        Port,
        "8443",
        Built,
        "Port to listen on; 0: any free port",
    ),
    flag(
        "namespace",
        "ARGOCD_PRINCIPAL_NAMESPACE",
        Text,
        "",
        Built,
        "Namespace of the principal and of Argo CD",
    ),
    flag(
        "allowed-namespaces",
        "ARGOCD_PRINCIPAL_ALLOWED_NAMESPACES",
        List,
        "",
        Built,
        "Patterns of the namespaces whose Applications are synchronised; empty: none",
    ),
    flag(
        "namespace-create-enable",
        "ARGOCD_PRINCIPAL_NAMESPACE_CREATE_ENABLE",
        Bool,
        "false",
        AUTONOMOUS,
        "Create the namespaces of autonomous agents",
    ),
    flag(
        "namespace-create-pattern",
        "ARGOCD_PRINCIPAL_NAMESPACE_CREATE_PATTERN",
        Text,
        "",
        AUTONOMOUS,
        "Names of the agents whose namespace may be created, a regular expression",
    ),
    flag(
        "namespace-create-labels",
        "ARGOCD_PRINCIPAL_NAMESPACE_CREATE_LABELS",
        List,
        "",
        AUTONOMOUS,
        "Labels of created namespaces, key=value",
    ),
    flag(
        "destination-based-mapping",
        "ARGOCD_PRINCIPAL_DESTINATION_BASED_MAPPING",
        Bool,
        "false",
        Built,
        "Map Applications to agents by destination name instead of by namespace",
    ),
    flag(
        "label-selector",
        "ARGOCD_PRINCIPAL_LABEL_SELECTOR",
        Text,
        "",
        Built,
        "Label selector of the objects that are synchronised",
    ),
    flag(
        "event-processors",
        "ARGOCD_PRINCIPAL_EVENT_PROCESSORS",
        Int,
        "10",
        Built,
        "Kubernetes requests in progress at the same time, over all agents",
    ),
    flag("kubeconfig", "", Text, "", Built, "Path of a kubeconfig; empty: the usual search order"),
    flag("kubecontext", "", Text, "", Built, "Context of the kubeconfig"),
    // gRPC transport and TLS.
    flag(
        "tls-secret-name",
        "ARGOCD_PRINCIPAL_TLS_SECRET_NAME",
        Text,
        "argocd-agent-principal-tls",
        Built,
        "Secret with the server certificate",
    ),
    flag(
        "tls-cert",
        "ARGOCD_PRINCIPAL_TLS_SERVER_CERT_PATH",
        Text,
        "",
        Built,
        "File with the server certificate, instead of the Secret",
    ),
    flag(
        "tls-key",
        "ARGOCD_PRINCIPAL_TLS_SERVER_KEY_PATH",
        Text,
        "",
        Built,
        "File with the server's private key",
    ),
    flag(
        "insecure-tls-generate",
        "ARGOCD_PRINCIPAL_TLS_SERVER_ALLOW_GENERATE",
        Bool,
        "false",
        Built,
        "INSECURE: use a throw-away server certificate",
    ),
    flag(
        "insecure-plaintext",
        "ARGOCD_PRINCIPAL_INSECURE_PLAINTEXT",
        Bool,
        "false",
        Built,
        "INSECURE: no TLS; for use behind a service mesh with header authentication",
    ),
    flag(
        "tls-ca-secret-name",
        "ARGOCD_PRINCIPAL_TLS_SERVER_ROOT_CA_SECRET_NAME",
        Text,
        "argocd-agent-ca",
        Built,
        "Secret with the CA of the agents' client certificates",
    ),
    flag(
        "root-ca-path",
        "ARGOCD_PRINCIPAL_TLS_SERVER_ROOT_CA_PATH",
        Text,
        "",
        Built,
        "File with the CA of the agents' client certificates, instead of the Secret",
    ),
    flag(
        "require-client-certs",
        "ARGOCD_PRINCIPAL_TLS_CLIENT_CERT_REQUIRE",
        Bool,
        "false",
        Built,
        "Require client certificates; implied by mtls authentication",
    ),
    flag(
        "client-cert-subject-match",
        "ARGOCD_PRINCIPAL_TLS_CLIENT_CERT_MATCH_SUBJECT",
        Bool,
        "false",
        Built,
        "Require that the certificate's common name is the agent's name",
    ),
    flag(
        "tls-min-version",
        "ARGOCD_PRINCIPAL_TLS_MIN_VERSION",
        Text,
        "tls1.3",
        Built,
        "Lowest TLS version: tls1.1 (served as tls1.2), tls1.2 or tls1.3",
    ),
    flag(
        "tls-max-version",
        "ARGOCD_PRINCIPAL_TLS_MAX_VERSION",
        Text,
        "",
        Built,
        "Highest TLS version; empty: no limit",
    ),
    flag(
        "tls-ciphersuites",
        "ARGOCD_PRINCIPAL_TLS_CIPHERSUITES",
        List,
        "",
        Built,
        "Cipher suites; \"list\" prints their names",
    ),
    flag(
        "enable-websocket",
        "ARGOCD_PRINCIPAL_ENABLE_WEBSOCKET",
        Bool,
        "false",
        Warned("gRPC over WebSocket is not part of this version: agents that use it cannot connect"),
        "Accept gRPC over WebSocket",
    ),
    flag(
        "keepalive-min-interval",
        "ARGOCD_PRINCIPAL_KEEP_ALIVE_MIN_INTERVAL",
        Duration,
        "0",
        Built,
        "Shortest interval of the agents' HTTP/2 pings; pings are answered at any interval",
    ),
    flag(
        "grpc-max-message-size",
        "ARGOCD_PRINCIPAL_GRPC_MAX_MESSAGE_SIZE",
        Int,
        "209715200",
        Built,
        "Largest gRPC message in bytes, both ways",
    ),
    // Resource proxy and self-registration.
    shipped(
        flag(
            "enable-resource-proxy",
            "ARGOCD_PRINCIPAL_ENABLE_RESOURCE_PROXY",
            Bool,
            "true",
            RESOURCE_PROXY,
            "Serve live resources of the agents to Argo CD",
        ),
        &["false"],
    ),
    flag(
        "resource-proxy-secret-name",
        "ARGOCD_PRINCIPAL_RESOURCE_PROXY_SECRET_NAME",
        Text,
        "argocd-agent-resource-proxy-tls",
        RESOURCE_PROXY,
        "Secret with the resource proxy's certificate",
    ),
    flag(
        "resource-proxy-cert-path",
        "ARGOCD_PRINCIPAL_RESOURCE_PROXY_TLS_CERT_PATH",
        Text,
        "",
        RESOURCE_PROXY,
        "File with the resource proxy's certificate",
    ),
    flag(
        "resource-proxy-key-path",
        "ARGOCD_PRINCIPAL_RESOURCE_PROXY_TLS_KEY_PATH",
        Text,
        "",
        RESOURCE_PROXY,
        "File with the resource proxy's private key",
    ),
    flag(
        "resource-proxy-ca-secret-name",
        "ARGOCD_PRINCIPAL_RESOURCE_PROXY_CA_SECRET_NAME",
        Text,
        "argocd-agent-ca",
        RESOURCE_PROXY,
        "Secret with the CA of Argo CD's client certificates",
    ),
    flag(
        "resource-proxy-ca-path",
        "ARGOCD_PRINCIPAL_RESOURCE_PROXY_TLS_CA_PATH",
        Text,
        "",
        RESOURCE_PROXY,
        "File with the CA of Argo CD's client certificates",
    ),
    flag(
        "resource-proxy-address",
        "ARGOCD_PRINCIPAL_RESOURCE_PROXY_ADDRESS",
        Text,
        "argocd-agent-resource-proxy:9090",
        RESOURCE_PROXY,
        "Address of the resource proxy in self-registered cluster Secrets",
    ),
    flag(
        "enable-self-cluster-registration",
        "ARGOCD_PRINCIPAL_ENABLE_SELF_CLUSTER_REGISTRATION",
        Bool,
        "false",
        Refused("agents are registered with argocd-agentctl in this version"),
        "Register agents when they authenticate for the first time",
    ),
    flag(
        "self-registration-client-cert-secret",
        "ARGOCD_PRINCIPAL_SELF_REGISTRATION_CLIENT_CERT_SECRET",
        Text,
        "",
        Warned("agents are registered with argocd-agentctl in this version"),
        "Secret with the client certificate of self-registered agents",
    ),
    // JWT and authentication.
    flag(
        "jwt-secret-name",
        "ARGOCD_PRINCIPAL_JWT_SECRET_NAME",
        Text,
        "argocd-agent-jwt",
        Built,
        "Secret with the key that signs tokens",
    ),
    flag(
        "jwt-key",
        "ARGOCD_PRINCIPAL_JWT_KEY_PATH",
        Text,
        "",
        Built,
        "File with the key that signs tokens, instead of the Secret",
    ),
    flag(
        "insecure-jwt-generate",
        "ARGOCD_PRINCIPAL_JWT_ALLOW_GENERATE",
        Bool,
        "false",
        Built,
        "INSECURE: sign tokens with a new key at every start",
    ),
    flag(
        "auth",
        "ARGOCD_PRINCIPAL_AUTH",
        Text,
        "",
        Built,
        "How agents authenticate: mtls:[subject:|uri:]<regexp>, userpass:<file> or header:<name>:<regexp>",
    ),
    // Redis.
    flag(
        "redis-server-address",
        "ARGOCD_PRINCIPAL_REDIS_SERVER_ADDRESS",
        Text,
        "argocd-redis:6379",
        REDIS,
        "Redis of the control plane",
    ),
    flag("redis-password", "REDIS_PASSWORD", Text, "", REDIS, "Password of Redis"),
    flag(
        "redis-creds-dir-path",
        "REDIS_CREDS_DIR_PATH",
        Text,
        "",
        REDIS,
        "Directory with the credentials of Redis",
    ),
    shipped(
        flag(
            "redis-compression-type",
            "ARGOCD_PRINCIPAL_REDIS_COMPRESSION_TYPE",
            Text,
            "gzip",
            REDIS,
            "Compression of values in Redis: gzip or none",
        ),
        &["none"],
    ),
    shipped(
        flag(
            "disable-redis-proxy",
            "ARGOCD_PRINCIPAL_DISABLE_REDIS_PROXY",
            Bool,
            "false",
            REDIS,
            "Do not serve the Redis proxy",
        ),
        &["true"],
    ),
    flag(
        "redis-tls-enabled",
        "ARGOCD_PRINCIPAL_REDIS_TLS_ENABLED",
        Bool,
        "false",
        REDIS,
        "Use TLS with Redis",
    ),
    shipped(
        flag(
            "redis-proxy-server-tls-cert",
            "ARGOCD_PRINCIPAL_REDIS_PROXY_SERVER_TLS_CERT_PATH",
            Text,
            "",
            REDIS,
            "File with the Redis proxy's certificate",
        ),
        &["/app/config/redis-proxy-server-tls/tls.crt"],
    ),
    shipped(
        flag(
            "redis-proxy-server-tls-key",
            "ARGOCD_PRINCIPAL_REDIS_PROXY_SERVER_TLS_KEY_PATH",
            Text,
            "",
            REDIS,
            "File with the Redis proxy's private key",
        ),
        &["/app/config/redis-proxy-server-tls/tls.key"],
    ),
    flag(
        "redis-proxy-server-tls-secret-name",
        "ARGOCD_PRINCIPAL_REDIS_PROXY_SERVER_TLS_SECRET_NAME",
        Text,
        "argocd-redis-proxy-tls",
        REDIS,
        "Secret with the Redis proxy's certificate",
    ),
    shipped(
        flag("redis-ca-path", "ARGOCD_PRINCIPAL_REDIS_CA_PATH", Text, "", REDIS, "File with the CA of Redis"),
        &["/app/config/redis-tls/ca.crt"],
    ),
    flag(
        "redis-ca-secret-name",
        "ARGOCD_PRINCIPAL_REDIS_CA_SECRET_NAME",
        Text,
        "argocd-redis-tls",
        REDIS,
        "Secret with the CA of Redis",
    ),
    flag(
        "redis-tls-insecure",
        "ARGOCD_PRINCIPAL_REDIS_TLS_INSECURE",
        Bool,
        "false",
        REDIS,
        "INSECURE: do not verify the certificate of Redis",
    ),
    // Logging, health, tracing.
    flag(
        "log-level",
        "ARGOCD_PRINCIPAL_LOG_LEVEL",
        List,
        "info",
        Built,
        "Log levels, [<subsystem>=]<level>: trace, debug, info, warning, error or fatal",
    ),
    flag("log-format", "ARGOCD_PRINCIPAL_LOG_FORMAT", Text, "text", Built, "Log format: text or json"),
    flag(
        "full-detail",
        "ARGOCD_PRINCIPAL_FULL_DETAIL",
        List,
        "",
        Warned("object bodies are never logged in this version"),
        "Log categories with full detail",
    ),
    flag(
        "metrics-port",
        "ARGOCD_PRINCIPAL_METRICS_PORT",
        Port,
        "8000",
        Built,
        "Port of the metrics; 0 or less: none",
    ),
    flag(
        "healthz-port",
        "ARGOCD_PRINCIPAL_HEALTH_CHECK_PORT",
        Port,
        "8003",
        Built,
        "Port of the health checks",
    ),
    shipped(
        flag(
            "pprof-port",
            "ARGOCD_PRINCIPAL_PPROF_PORT",
            Port,
            "0",
            Warned("there is no profiling server in this version"),
            "Port of the profiling server",
        ),
        &["-1"],
    ),
    flag("otlp-address", "ARGOCD_PRINCIPAL_OTLP_ADDRESS", Text, "", TRACING, "Address of an OTLP collector"),
    flag(
        "otlp-insecure",
        "ARGOCD_PRINCIPAL_OTLP_INSECURE",
        Bool,
        "false",
        TRACING,
        "No TLS to the OTLP collector",
    ),
    // High availability.
    flag(
        "ha-enabled",
        "ARGOCD_PRINCIPAL_HA_ENABLED",
        Bool,
        "false",
        Refused(
            "high availability is not part of this version, and two principals that do not know of each other would both write",
        ),
        "Run as one of two principals",
    ),
    flag("ha-preferred-role", "ARGOCD_PRINCIPAL_HA_PREFERRED_ROLE", Text, "primary", HA, "Role at start"),
    flag(
        "ha-peer-address",
        "ARGOCD_PRINCIPAL_HA_PEER_ADDRESS",
        Text,
        "",
        HA,
        "Address of the other principal",
    ),
    flag(
        "ha-failover-timeout",
        "ARGOCD_PRINCIPAL_HA_FAILOVER_TIMEOUT",
        Duration,
        "30s",
        HA,
        "Time until fail-over",
    ),
    shipped(
        flag(
            "ha-admin-port",
            "ARGOCD_PRINCIPAL_HA_ADMIN_PORT",
            Port,
            "0",
            HA,
            "Port of the administration API",
        ),
        &["8405"],
    ),
    flag(
        "ha-allowed-replication-clients",
        "ARGOCD_PRINCIPAL_HA_ALLOWED_REPLICATION_CLIENTS",
        List,
        "",
        HA,
        "Principals that may replicate",
    ),
    flag(
        "ha-replication-initial-ack-timeout",
        "ARGOCD_PRINCIPAL_HA_REPLICATION_INITIAL_ACK_TIMEOUT",
        Duration,
        "0",
        HA,
        "Time until the first acknowledgement of a replica",
    ),
];

/// Settings that exist only as environment variables, with their defaults.
pub const ENV_ONLY: &[(&str, &str, &str)] = &[
    ("ARGOCD_AGENT_KUBE_QPS", "100", "the API server's own fairness limits requests, not the principal"),
    ("ARGOCD_AGENT_KUBE_BURST", "300", "the API server's own fairness limits requests, not the principal"),
    (
        "ARGOCD_AGENT_RECV_QUEUE_SIZE",
        "1000",
        "there is no event queue, hence no bound that could lose events",
    ),
    (
        "ARGOCD_AGENT_SEND_QUEUE_SIZE",
        "1000",
        "there is no event queue, hence no bound that could lose events",
    ),
    ("ARGOCD_REDIS_KEY_PREFIX", "", "cluster information in Redis is not part of this version"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique() {
        let names: BTreeSet<_> = FLAGS.iter().map(|flag| flag.name).collect();
        assert_eq!(names.len(), FLAGS.len());
        let envs: Vec<_> = FLAGS.iter().map(|flag| flag.env).filter(|env| !env.is_empty()).collect();
        assert_eq!(envs.iter().collect::<BTreeSet<_>>().len(), envs.len());
    }
}

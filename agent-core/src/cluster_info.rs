//! What Argo CD's UI shows of a cluster: the cache entry that the hub writes for each agent, and the counts that it is
//! made from. Compression is the shell's: it needs a library.

use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

use crate::event::BodyError;
use crate::json::{self, ObjectWriter};

/// How long an entry lives in Redis.
pub const TTL: Duration = Duration::from_secs(600);
/// How often the entries of mapped clusters are written again, so that they outlive [`TTL`].
pub const RENEWAL: Duration = Duration::from_secs(180);

/// Argo CD's setting of what it stores.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Compression {
    /// Values are gzip. A writer only flushes its stream: a reader stops after the JSON value.
    #[default]
    Gzip,
    /// Values are plain.
    None,
}

/// The Redis key of the entry for `server`, the server in the cluster's Secret. `prefix` is Argo CD's key prefix, usually empty.
pub fn key(prefix: &str, server: &str, compression: Compression) -> String {
    let suffix = match compression {
        Compression::Gzip => ".gz",
        Compression::None => "",
    };
    alloc::format!("{prefix}cluster|info|{server}|{FORMAT}{suffix}")
}

/// Counts of a site's cluster cache: body of `cluster-cache-info-update`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Applications.
    pub applications: i64,
    /// API resources.
    pub apis: i64,
    /// Objects.
    pub resources: i64,
}

impl Counts {
    /// The body as JSON.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(80);
        let mut writer = ObjectWriter::new(&mut out);
        writer.raw(APPLICATIONS, decimal(self.applications).as_bytes());
        writer.raw(APIS, decimal(self.apis).as_bytes());
        writer.raw(RESOURCES, decimal(self.resources).as_bytes());
        writer.end();
        out
    }

    /// Reads a body; what is absent is 0. Case of the keys does not count, as in the reference.
    pub fn decode(body: &[u8]) -> Result<Self, BodyError> {
        let mut counts = Self::default();
        read_counts(
            body,
            &mut [
                (APPLICATIONS, &mut counts.applications),
                (APIS, &mut counts.apis),
                (RESOURCES, &mut counts.resources),
            ],
        )?;
        Ok(counts)
    }
}

fn read_counts(object: &[u8], counts: &mut [(&'static str, &mut i64)]) -> Result<(), BodyError> {
    let mut outcome = Ok(());
    json::visit_members(object, &mut |key, value| {
        let Some((name, count)) = counts.iter_mut().find(|(name, _)| key.eq_ignore_ascii_case(name)) else {
            return;
        };
        let Some(value) = json::present(value) else { return };
        match core::str::from_utf8(value).ok().and_then(|text| text.parse().ok()) {
            Some(value) => **count = value,
            None => outcome = Err(BodyError::Field(name)),
        }
    })?;
    outcome
}

/// A cache entry, borrowing what is only passed on.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ClusterInfo<'a> {
    /// Raw `connectionState`; `None` where it says nothing.
    connection: Option<&'a [u8]>,
    server_version: Option<&'a [u8]>,
    last_sync: Option<&'a [u8]>,
    api_versions: Option<&'a [u8]>,
    /// The counts.
    pub counts: Counts,
}

impl<'a> ClusterInfo<'a> {
    /// Reads an entry, decompressed.
    pub fn parse(entry: &'a [u8]) -> Result<Self, BodyError> {
        let entry = json::value(entry)?;
        let mut info = Self::default();
        let mut cache = None;
        json::visit_members(entry, &mut |key, value| {
            let value = json::present(value);
            match &*key {
                "connectionState" => info.connection = value,
                "serverVersion" => info.server_version = value,
                "apiVersions" => info.api_versions = value,
                "cacheInfo" => cache = value,
                _ => {}
            }
        })?;
        if info.connection.is_some_and(|state| json::same(state, NO_STATE.as_bytes())) {
            info.connection = None;
        }
        read_counts(entry, &mut [(APPLICATIONS, &mut info.counts.applications)])?;
        if let Some(cache) = cache {
            read_counts(
                cache,
                &mut [(RESOURCES, &mut info.counts.resources), (APIS, &mut info.counts.apis)],
            )?;
            info.last_sync = json::member(cache, "lastCacheSyncTime")?;
        }
        Ok(info)
    }

    /// The entry that `counts` make of this one: the connection stays, and with it the time of the last sync; what else the
    /// entry said about the cluster was said by another writer and goes.
    pub fn with_counts(&self, counts: Counts) -> Self {
        Self {
            connection: self.connection,
            last_sync: self.connection.and(self.last_sync),
            counts,
            ..Self::default()
        }
    }

    /// The entry as Argo CD writes it, newline included.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256);
        let mut writer = ObjectWriter::new(&mut out);
        writer.raw("connectionState", self.connection.unwrap_or(NO_STATE.as_bytes()));
        if let Some(version) = self.server_version {
            writer.raw("serverVersion", version);
        }
        let mut cache = ObjectWriter::new(writer.key("cacheInfo"));
        for (key, count) in [(RESOURCES, self.counts.resources), (APIS, self.counts.apis)] {
            if count != 0 {
                cache.raw(key, decimal(count).as_bytes());
            }
        }
        if let Some(time) = self.last_sync {
            cache.raw("lastCacheSyncTime", time);
        }
        cache.end();
        writer.raw(APPLICATIONS, decimal(self.counts.applications).as_bytes());
        if let Some(versions) = self.api_versions {
            writer.raw("apiVersions", versions);
        }
        writer.end();
        out.push(b'\n');
        out
    }
}

/// The entry of an agent whose stream has begun or ended `at` that time (RFC 3339, whole seconds, UTC): its counts are no longer known.
pub fn connection_entry(agent: &str, connected: bool, at: &str) -> Vec<u8> {
    let (status, word) = if connected { ("Successful", "connected") } else { ("Failed", "disconnected") };
    let mut state = Vec::with_capacity(128);
    let mut writer = ObjectWriter::new(&mut state);
    writer.string("status", status);
    writer.string("message", &alloc::format!("Agent: '{agent}' is {word} with principal"));
    writer.string("attemptedAt", at);
    writer.end();
    ClusterInfo { connection: Some(&state), ..ClusterInfo::default() }.encode()
}

fn decimal(number: i64) -> String {
    alloc::format!("{number}")
}

const APPLICATIONS: &str = "applicationsCount";
const APIS: &str = "apisCount";
const RESOURCES: &str = "resourcesCount";
/// Version of Argo CD's cache format, part of every key.
const FORMAT: &str = "1.8.3";
/// A connection state that says nothing.
const NO_STATE: &str = r#"{"status":"","message":"","attemptedAt":null}"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        assert_eq!(
            key("", "https://rp:9090?agentName=a", Compression::Gzip),
            "cluster|info|https://rp:9090?agentName=a|1.8.3.gz"
        );
        assert_eq!(key("p", "s", Compression::None), "pcluster|info|s|1.8.3");
    }

    #[test]
    fn an_agent_comes_reports_and_goes() {
        let entry = connection_entry("a", true, "2026-01-02T03:04:05Z");
        assert_eq!(
            core::str::from_utf8(&entry).unwrap(),
            "{\"connectionState\":{\"status\":\"Successful\",\"message\":\"Agent: 'a' is connected with principal\",\
             \"attemptedAt\":\"2026-01-02T03:04:05Z\"},\"cacheInfo\":{},\"applicationsCount\":0}\n"
        );
        let counts = Counts { applications: 3, apis: 120, resources: 840 };
        let info = ClusterInfo::parse(&entry).unwrap().with_counts(counts).encode();
        assert!(info.starts_with(&entry[..entry.len() - 40]));
        assert!(info.ends_with(
            b"\"cacheInfo\":{\"resourcesCount\":840,\"apisCount\":120},\"applicationsCount\":3}\n"
        ));
        assert_eq!(ClusterInfo::parse(&info).unwrap().counts, counts);
        let gone = connection_entry("a", false, "2026-01-02T03:04:05Z");
        assert_eq!(ClusterInfo::parse(&gone).unwrap().counts, Counts::default());
    }

    #[test]
    fn counts_without_an_entry() {
        let info = ClusterInfo::default().with_counts(Counts { applications: -1, ..Counts::default() });
        assert_eq!(
            info.encode(),
            b"{\"connectionState\":{\"status\":\"\",\"message\":\"\",\"attemptedAt\":null},\"cacheInfo\":{},\"applicationsCount\":-1}\n"
        );
    }

    #[test]
    fn what_another_writer_said() {
        let entry =
            br#"{"connectionState":{"status":"","message":"","attemptedAt":null},"serverVersion":"1.36",
            "cacheInfo":{"lastCacheSyncTime":"t"},"applicationsCount":1,"apiVersions":["v1"]}"#;
        let info = ClusterInfo::parse(entry).unwrap();
        let read: Vec<u8> = info.encode();
        assert!(json::same(&read, entry));
        assert!(info.with_counts(Counts::default()).last_sync.is_none());
    }

    #[test]
    fn bodies() {
        let body = br#"{"applicationsCount":-1,"apisCount":9223372036854775807,"resourcesCount":0}"#;
        assert_eq!(Counts::decode(body).unwrap().encode(), body);
        assert_eq!(Counts::decode(b"{}"), Ok(Counts::default()));
        for body in
            ["", "[]", r#"{"apisCount":"1"}"#, r#"{"apisCount":1.5}"#, r#"{"apisCount":9223372036854775808}"#]
        {
            assert!(Counts::decode(body.as_bytes()).is_err(), "{body}");
        }
        for entry in ["", "[]", r#"{"cacheInfo":1}"#] {
            assert!(ClusterInfo::parse(entry.as_bytes()).is_err(), "{entry}");
        }
    }
}

//! Names and bcrypt hashes from a file, read once.

use std::collections::HashMap;

use agent_core::request::is_dns_label;

/// The users of a password file.
pub struct Users(HashMap<String, String>);

impl std::fmt::Debug for Users {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Users").field(&self.0.len()).finish()
    }
}

impl Users {
    /// Reads `name:hash` lines; lines that are not of that form are skipped with a warning.
    pub fn load(path: &str, warnings: &mut Vec<String>) -> Result<Self, String> {
        let text =
            std::fs::read_to_string(path).map_err(|error| format!("--auth userpass:{path}: {error}"))?;
        Ok(Self::parse(&text, path, warnings))
    }

    fn parse(text: &str, path: &str, warnings: &mut Vec<String>) -> Self {
        let mut users = HashMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') || line.starts_with("//") {
                continue;
            }
            match line.split_once(':').filter(|(name, hash)| is_dns_label(name) && is_bcrypt(hash)) {
                Some((name, hash)) => {
                    users.insert(name.to_owned(), hash.to_owned());
                }
                None => {
                    warnings.push(format!("{path}:{}: skipped: not of the form name:bcrypt-hash", number + 1))
                }
            }
        }
        Self(users)
    }

    /// The name, if the secret is right. An unknown name costs as much time as a wrong secret.
    pub fn check(&self, name: &str, secret: &str) -> Result<String, String> {
        let hash = self.0.get(name);
        let right = bcrypt::verify(secret, hash.map_or(DUMMY, String::as_str)).unwrap_or(false);
        if right && hash.is_some() { Ok(name.to_owned()) } else { Err("wrong name or secret".to_owned()) }
    }
}

fn is_bcrypt(hash: &str) -> bool {
    let bytes = hash.as_bytes();
    ["$2a$", "$2b$", "$2x$", "$2y$"].iter().any(|prefix| hash.starts_with(prefix))
        && bytes.len() > 6
        && bytes[4].is_ascii_digit()
        && bytes[5].is_ascii_digit()
        && bytes[6] == b'$'
}

/// Cost 10, of a secret that nobody knows.
const DUMMY: &str = "$2b$10$OjIC8OGU1p6zYKkWCbq4f.vDGmJcqsGmS9Cg3xFvbyL7eCn3Jd1Zy";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_and_skips() {
        let hash = bcrypt::hash("secret", 4).unwrap();
        let mut warnings = Vec::new();
        let text = format!("# comment\n// comment\n agent-1:{hash} \nbad line\nBad:{hash}\nx:plain\n");
        let users = Users::parse(&text, "f", &mut warnings);
        assert_eq!(warnings.len(), 3);
        assert_eq!(users.check("agent-1", "secret").unwrap(), "agent-1");
        assert!(users.check("agent-1", "wrong").is_err());
        assert!(users.check("nobody", "secret").is_err());
        assert!(bcrypt::verify("x", DUMMY).is_ok(), "the dummy costs a real comparison");
    }
}
